"""Models that sleep and wake: what the kernel says of their memory, tokens as stock's, weights written meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.allocator.errors import DriverError, ManageError, ModelInUse, PoolExhausted
from ballonet.hooks.managed import weights_of
from ballonet.hooks.weights.ranges import is_away
from ballonet.offload.residency.mover import Mover
from ballonet.offload.residency.ring import OwnSlots, StreamedLayer

from . import models
from .pool import bytes_that_exist, installing
from .portrait import all_in_pool, bits, tensors
from .tuned import Clock, Tuned

PAGE = 4096
BUDGET = 2**24
LEVELS = (1, 2)


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[Device]:
    tuned(weights={"large": 2**11}, waiting={"gate": 0.5, "gate_look": 0.01}, waits=Clock(step=0.05))
    with installing(BUDGET, PAGE) as now:
        yield now()


def build(scale: float = 1.0) -> Any:
    """A model whose layers have `scale` times the weights that all such models have."""
    with install.stock(), torch.no_grad():
        model = models.build("llama", hidden_size=64, intermediate_size=96)
        for weight in model.model.layers.parameters():
            weight.mul_(scale)
        return model


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """A model whose weights lie in a file."""
    with install.stock():
        build().save_pretrained(tmp_path)
        return AutoModelForCausalLM.from_pretrained(tmp_path).eval()


def answer(model: Any, tokens: int = 6, **more: Any) -> torch.Tensor:
    return models.generate(model, "greedy", models.prompts(2, 7), tokens=tokens, **more).tokens


def device_bytes(device: Device) -> int:
    """Bytes of the device that exist, without what torch's activations of before are kept in."""
    device.trim()
    return bytes_that_exist()


@pytest.mark.parametrize("level", LEVELS)
def test_all_of_a_sleeping_model_leaves_the_device_and_answers_as_before(
    device: Device, loaded: Any, level: int
) -> None:
    stock = answer(loaded)
    empty = device_bytes(device)
    with ballonet.manage(loaded) as managed:
        assert torch.equal(answer(loaded), stock)
        awake = device_bytes(device)
        for _ in range(3):
            managed.sleep(level)
            assert managed.asleep == level
            assert bytes_that_exist() <= empty < awake
            assert ballonet.stats().pages.weights == 0
            assert torch.equal(answer(loaded), stock)
            assert managed.asleep == 0
            answer(loaded, 1)  # layers go back to their own addresses
            assert device_bytes(device) == awake
            assert all_in_pool(loaded)
            assert bytes_that_exist("host") <= PAGE, "but for the page that all addresses led to at level 2"
        device.check()


def test_what_the_file_holds_takes_no_host_memory_at_level_2_and_the_rest_does(device: Device, loaded: Any) -> None:
    with ballonet.manage(loaded) as managed:
        managed.sleep(1)
        whole = bytes_that_exist("host")
        managed.wake()
        with torch.no_grad():
            changed = loaded.model.layers[1].mlp.up_proj.weight.mul_(2).nbytes
        expected = answer(loaded)
        managed.sleep(2)
        assert changed <= bytes_that_exist("host") <= changed + 6 * PAGE < whole // 8
        assert torch.equal(answer(loaded), expected)


def test_weights_that_somebody_refers_to_do_not_go_to_the_file(device: Device, loaded: Any) -> None:
    held = [loaded.lm_head.weight, loaded.model.layers[0].self_attn.q_proj.weight]
    before = [bits(tensor) for tensor in held]
    with ballonet.manage(loaded) as managed:
        managed.sleep(2)
        assert [bits(tensor) for tensor in held] == before, "they are read at their addresses"
        assert managed.asleep == 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_sleeping_model_shows_its_weights_to_whoever_asks(loaded: Any, level: int) -> None:
    before = {name: bits(tensor) for name, tensor in tensors(loaded).items()}
    with ballonet.manage(loaded) as managed:
        managed.sleep(level)
        assert {name: bits(tensor) for name, tensor in tensors(loaded).items()} == before
        assert managed.asleep == level


def copied(model: Any, new: Any) -> None:
    with torch.no_grad():
        for mine, its in zip(model.parameters(), new.parameters(), strict=True):
            mine.copy_(its)


def data_set(model: Any, new: Any) -> None:
    for mine, its in zip(model.parameters(), new.parameters(), strict=True):
        mine.data = its.data.clone()


def data_copied(model: Any, new: Any) -> None:
    for mine, its in zip(model.parameters(), new.parameters(), strict=True):
        mine.data.copy_(its)


def loaded_in(model: Any, new: Any) -> None:
    model.load_state_dict(new.state_dict())


def assigned(model: Any, new: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in new.state_dict().items()}, assign=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", [copied, data_set, data_copied, loaded_in, assigned])
def test_weights_written_while_it_sleeps_are_there_after_waking_and_no_prefix_of_the_old_ones(
    loaded: Any, level: int, write: Callable[[Any, Any], None]
) -> None:
    new = build(1.5)
    expected, before = answer(new), answer(loaded)
    assert not torch.equal(expected, before)
    with ballonet.manage(loaded, prefix_cache=True) as managed:
        answer(loaded)
        managed.sleep(level)
        write(loaded, new)
        assert torch.equal(answer(loaded), expected)
        assert managed.prefixes is not None
        assert managed.prefixes.reused == 0
        assert not managed.report().unmanaged_tensors


def test_prefixes_of_weights_that_nobody_touched_are_used_after_waking(loaded: Any) -> None:
    with ballonet.manage(loaded, prefix_cache=True) as managed:
        expected = answer(loaded)
        managed.sleep()
        assert ballonet.stats().pages.kv == 0
        assert torch.equal(answer(loaded), expected)
        assert managed.prefixes is not None
        assert managed.prefixes.reused > 0


def test_a_cache_held_by_hand_sleeps_with_its_model(device: Device, loaded: Any) -> None:
    prompt = torch.randint(2, 90, (1, 400))
    with ballonet.manage(loaded) as managed, torch.no_grad():
        last = []
        for sleeps in (False, True):
            cache = DynamicCache(config=loaded.config)
            loaded(prompt, cache=cache)
            if sleeps:
                managed.sleep()
                pages = ballonet.stats().pages
                assert pages.kv == pages.weights == 0
            last.append(loaded(prompt[:, :1], cache=cache).logits)
            assert cache.get_seq_length() == prompt.shape[1] + 1
            del cache
        assert torch.equal(*last)


def test_layers_come_back_once_each_and_in_the_forward_that_wakes(loaded: Any) -> None:
    with ballonet.manage(loaded) as managed:
        answer(loaded)
        managed.sleep()
        ring, layers = weights_of(managed).ring, sum(weights_of(managed).layer_pages(3)) * PAGE
        before = ring.copied
        answer(loaded, 1)
        assert ring.copied - before == layers
        assert len(ring.own.layers) == 3, "they are read from slots, which were filled beside the computation"
        answer(loaded, 1)
        assert not ring.own.layers
        assert ring.copied - before == layers, "their pages went to their own addresses"


def test_slots_of_layers_that_come_back_open_one_layer_ahead_of_the_pass(loaded: Any) -> None:
    opened = list[tuple[int, ...]]()
    with ballonet.manage(loaded) as managed:
        answer(loaded)
        managed.sleep()
        ring = weights_of(managed).ring
        hooks = [
            layer.self_attn.register_forward_pre_hook(lambda *_: opened.append(ring.own.layers))
            for layer in loaded.model.layers
        ]
        answer(loaded, 1)
        assert opened == [(0, 1), (0, 1, 2), (0, 1, 2)]
        for hook in hooks:
            hook.remove()


def test_a_layer_for_which_no_page_is_left_is_read_on_the_host_and_streams_from_then_on(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = answer(loaded)
    open_slot = OwnSlots.open

    def open_but_one(slots: OwnSlots, streamed: StreamedLayer) -> Any:
        if streamed.layer == 1:
            slots.coming.pop(1).close()
            raise PoolExhausted("none left")
        return open_slot(slots, streamed)

    with ballonet.manage(loaded) as managed:
        managed.sleep()
        monkeypatch.setattr(OwnSlots, "open", open_but_one)
        answer(loaded, 1)
        assert weights_of(managed).ring.own.layers == (0, 2)
        assert torch.equal(answer(loaded), stock)
        assert managed.report().streamed == (1,)


def resident_rest(managed: ballonet.Managed) -> bool:
    """Does all that lies outside of layers lie on the device?"""
    return not any(is_away(part.range) for part in weights_of(managed).parts(None))


@pytest.mark.parametrize("rows", [1, None], ids=["one row", "all rows"])
def test_embeddings_and_head_come_back_late_where_few_rows_of_them_are_read(loaded: Any, rows: int | None) -> None:
    tokens = models.prompts(2, 7)["input_ids"]
    with torch.no_grad(), ballonet.manage(loaded) as managed:
        wanted = loaded(tokens, logits_to_keep=rows or 0).logits
        managed.sleep()
        assert torch.equal(loaded(tokens, logits_to_keep=rows or 0).logits, wanted)
        assert resident_rest(managed) == (rows is None)
        assert managed.asleep == 0
        assert torch.equal(loaded(tokens, logits_to_keep=rows or 0).logits, wanted)
        assert resident_rest(managed)


@pytest.mark.parametrize("act", ["release", "sleep", "write", "replace", "gradients"])
def test_embeddings_that_are_not_back_yet_are_right_whatever_is_done_next(
    device: Device, loaded: Any, act: str
) -> None:
    with install.stock():
        twin = AutoModelForCausalLM.from_pretrained(loaded.name_or_path).eval()
    managed = ballonet.manage(loaded)
    managed.sleep()
    with torch.no_grad():
        loaded(models.prompts(2, 7)["input_ids"], logits_to_keep=1)
    assert not resident_rest(managed)
    if act == "release":
        managed.release()
    elif act == "sleep":
        managed.sleep(2)
    elif act == "write":
        for model in (loaded, twin):
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(2)
    elif act == "replace":
        for model, memory in ((loaded, nullcontext), (twin, install.stock)):
            with memory():
                model.lm_head.weight.data = model.lm_head.weight.data * 3
    elif act == "gradients":
        grads = [
            torch.autograd.grad(model(**models.prompts(2, 7)).logits.sum(), model.lm_head.weight)[0]
            for model in (loaded, twin)
        ]
        assert torch.equal(*grads)
    with install.stock():
        stock = answer(twin)
    assert torch.equal(answer(loaded), stock)
    managed.release()
    device.check()


def test_a_tower_outside_of_layers_comes_back_before_the_forward_that_wakes(loaded: Any) -> None:
    """A tower of images reads all of its weights many times in a forward."""
    loaded.model.tower = torch.nn.Linear(64, 64)
    with torch.no_grad(), ballonet.manage(loaded) as managed:
        managed.sleep()
        loaded(models.prompts(2, 7)["input_ids"], logits_to_keep=1)
        assert resident_rest(managed)


def test_without_room_on_the_host_it_is_refused_with_the_numbers_and_nothing_changes(
    device: Device, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = answer(loaded)
    with ballonet.manage(loaded) as managed:
        before = managed.report().pages
        monkeypatch.setattr("ballonet.hooks.streaming.sleep.host_pages_left", lambda device: 5)
        with pytest.raises(ManageError, match=rf"{before * PAGE // 1024}.*would go to the host, and 20KiB are left"):
            managed.sleep()
        assert managed.asleep == 0
        assert managed.report().pages == before
        assert not managed.report().streamed
        assert torch.equal(answer(loaded), stock)
    device.check()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fails_at", range(4))
def test_a_driver_that_refuses_in_the_middle_leaves_the_model_awake(
    device: Device, loaded: Any, monkeypatch: pytest.MonkeyPatch, level: int, fails_at: int
) -> None:
    stock, count = answer(loaded), [0]
    evict = Mover.evict

    def refused(mover: Mover, *args: Any, **more: Any) -> int:
        count[0] += 1
        if count[0] == fails_at + 1:
            raise DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN")
        return evict(mover, *args, **more)

    with ballonet.manage(loaded) as managed:
        answer(loaded)
        monkeypatch.setattr(Mover, "evict", refused)
        with pytest.raises(DriverError):
            managed.sleep(level)
        assert managed.asleep == 0
        monkeypatch.undo()
        assert torch.equal(answer(loaded), stock)
        managed.sleep(level)
        assert torch.equal(answer(loaded), stock)
    device.check()


def test_it_waits_for_a_call_of_generate_and_says_so(loaded: Any) -> None:
    refused: list[Exception] = []

    def stop(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        def ask() -> None:
            try:
                managed.sleep(timeout=0.2)
            except ModelInUse as error:
                refused.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
        return torch.ones(ids.shape[0], dtype=torch.bool)

    with ballonet.manage(loaded) as managed:
        answer(loaded, stopping_criteria=[stop])
        assert "serves requests" in str(refused[0])
        managed.sleep()
        assert managed.asleep == 1


@pytest.mark.parametrize("level", LEVELS)
def test_released_while_it_sleeps_it_is_as_it_was(device: Device, loaded: Any, level: int) -> None:
    stock, before = answer(loaded), {name: bits(tensor) for name, tensor in tensors(loaded).items()}
    managed = ballonet.manage(loaded)
    managed.sleep(level)
    managed.release()
    assert managed.asleep == 0
    assert {name: bits(tensor) for name, tensor in tensors(loaded).items()} == before
    assert torch.equal(answer(loaded), stock)


@pytest.mark.parametrize("level", LEVELS)
def test_what_outlives_a_model_collected_asleep_has_its_values(device: Device, tmp_path: Path, level: int) -> None:
    with install.stock():
        build().save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    head, expected = model.lm_head, bits(model.lm_head.weight)
    managed = ballonet.manage(model)
    managed.sleep(level)
    del model
    gc.collect()
    assert managed.model is None
    assert bits(head.weight) == expected


def test_two_threads_wake_one_model_and_both_have_stock_s_tokens(loaded: Any) -> None:
    stock, answers = answer(loaded), []
    with ballonet.manage(loaded) as managed:
        for level in LEVELS:
            managed.sleep(level)
            threads = [threading.Thread(target=lambda: answers.append(answer(loaded))) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert managed.asleep == 0
    assert all(torch.equal(tokens, stock) for tokens in answers)
    assert len(answers) == 4


def test_gradients_are_right_after_waking(loaded: Any) -> None:
    inputs = models.prompts(2, 7)

    def gradient() -> torch.Tensor:
        loaded.zero_grad()
        loaded(**inputs, labels=inputs["input_ids"]).loss.backward()
        return loaded.model.layers[0].mlp.up_proj.weight.grad.clone()

    expected = gradient()
    with ballonet.manage(loaded) as managed:
        for level in LEVELS:
            loaded.zero_grad()
            managed.sleep(level)
            assert torch.equal(gradient(), expected)
    loaded.zero_grad()


def test_one_model_sleeps_while_another_has_all_the_memory(device: Device) -> None:
    first, second = build(), build(1.5)
    expected = answer(first), answer(second)
    one = ballonet.manage(first)
    answer(first)
    alone = one.report().pages * PAGE
    one.sleep()
    ballonet.set_budget(device_bytes(device) + alone + 64 * PAGE)
    two = ballonet.manage(second)
    for _ in range(2):
        assert torch.equal(answer(second), expected[1])
        assert ballonet.stats().pages.weights == two.report().pages, "the one that sleeps has none"
        two.sleep()
        assert torch.equal(answer(first), expected[0])
        one.sleep()
    one.release()
    two.release()


def test_all_models_sleep_and_wake_by_one_call(device: Device) -> None:
    both = [build(), build(1.5)]
    expected = [answer(model) for model in both]
    managed = [ballonet.manage(model) for model in both]
    ballonet.sleep()
    assert [one.asleep for one in managed] == [1, 1]
    assert ballonet.stats().pages.weights == 0
    ballonet.wake()
    assert [one.asleep for one in managed] == [0, 0]
    assert all(torch.equal(answer(model), tokens) for model, tokens in zip(both, expected, strict=True))
    for one in managed:
        one.release()


def test_a_streaming_model_sleeps_and_streams_again(loaded: Any) -> None:
    stock = answer(loaded)
    with ballonet.manage(loaded, interval=1) as managed:
        assert torch.equal(answer(loaded), stock)
        streamed = managed.report().streamed
        assert streamed
        for level in LEVELS:
            managed.sleep(level)
            assert torch.equal(answer(loaded), stock)
            assert managed.report().streamed == streamed


def test_a_level_that_there_is_not_is_refused(loaded: Any) -> None:
    with ballonet.manage(loaded) as managed, pytest.raises(ManageError, match=r"give 1 .* or 2"):
        managed.sleep(3)
