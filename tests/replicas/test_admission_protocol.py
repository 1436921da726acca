"""The admission of replicas, without a store."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.replicas.admission_protocol import AdmissionClient, AdmissionServer, Reply
from ballonet.hooks.replicas.errors import JoinRefused, OtherModel, SecretRefused
from ballonet.hooks.replicas.fingerprint import Fingerprint, fingerprint_of
from ballonet.hooks.replicas.secret import proof, proves

from ..pool import take_out
from ..tuned import Clock

SERVED = Fingerprint("0a1b", "bfloat16 x 291", "0.1", "2.13.0", "5.23.0")


def server(clock: Clock | None = None) -> AdmissionServer:
    return AdmissionServer("a secret", SERVED, clock or Clock(), within=30.0)


def answered(reply: Reply | None) -> str:
    assert reply is not None
    return reply.text


def test_who_knows_the_secret_and_runs_the_same_gets_a_number() -> None:
    at = server()
    for number in range(3):
        client = AdmissionClient("a secret", SERVED)
        said = client.prove(answered(at.reply_to(client.hello())))
        reply = at.reply_to(said)
        assert reply is not None
        assert (reply.queue, reply.admitted) == (client.queue, (number, SERVED))
        assert client.member(reply.text) == number
        assert "a secret" not in said + reply.text


def test_without_a_secret_nothing_is_asked() -> None:
    for none in (None, ""):
        with pytest.raises(SecretRefused, match="none was given"):
            AdmissionClient(none, SERVED).hello()


def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    at = server()
    client = AdmissionClient("another", SERVED)
    first = answered(at.reply_to(client.hello()))
    with pytest.raises(SecretRefused, match="another secret than this replica"):
        client.prove(first)

    class Bold(AdmissionClient):
        """Does not look at what the supervisor proves."""

        def prove(self, text: str) -> str:
            real = json.loads(AdmissionClient("a secret", SERVED, self.id).prove(text))
            return json.dumps({**real, "proof": "0" * 64})

    bold = Bold("another", SERVED)
    reply = at.reply_to(bold.prove(answered(at.reply_to(bold.hello()))))
    assert reply is not None
    assert reply.admitted is None
    assert at.refused == 1
    with pytest.raises(SecretRefused, match="does not accept"):
        bold.member(reply.text)


def test_what_is_proved_is_the_parts_and_not_what_they_make_together() -> None:
    assert proof("a secret", "ab", "c") != proof("a secret", "a", "bc")
    assert proves(proof("a secret", "ab", "c"), "a secret", "ab", "c")
    assert not proves(proof("", "ab"), "", "ab")  # who has no secret believes nobody
    assert not proves("", "a secret", "ab")
    assert not proves("ä", "a secret", "ab")


def test_a_proof_is_good_once_and_for_its_fingerprint() -> None:
    at = server()
    client = AdmissionClient("a secret", SERVED)
    said = client.prove(answered(at.reply_to(client.hello())))
    changed = json.loads(said)
    changed["fingerprint"] = replace(SERVED, weights="ffff").encode()
    for text in (json.dumps(changed), said):  # the challenge went with the first of them
        reply = at.reply_to(text)
        assert reply is not None
        assert reply.admitted is None
    again = AdmissionClient("a secret", SERVED, client.id)
    assert (good := at.reply_to(again.prove(answered(at.reply_to(again.hello()))))) is not None
    assert good.admitted is not None
    assert (replayed := at.reply_to(said)) is not None
    assert replayed.admitted is None


def test_who_answers_too_late_begins_again() -> None:
    clock = Clock()
    at = server(clock)
    client = AdmissionClient("a secret", SERVED)
    said = client.prove(answered(at.reply_to(client.hello())))
    clock.now = 31.0
    with pytest.raises(SecretRefused, match="too late"):
        client.member(answered(at.reply_to(said)))


@pytest.mark.parametrize(
    ("changed", "differences"),
    [
        ({"weights": "ffff"}, ("weights is ffff, not 0a1b",)),
        ({"dtype": "float16 x 291", "weights": "ffff"}, ("dtype is float16 x 291, not bfloat16 x 291",)),
        ({"torch": "2.12.0", "ballonet": "0.2"}, ("ballonet is 0.2, not 0.1", "torch is 2.12.0, not 2.13.0")),
        ({"transformers": "5.17"}, ("transformers is 5.17, not 5.23.0",)),
    ],
)
def test_who_runs_something_else_is_told_what_differs(changed: dict[str, str], differences: tuple[str, ...]) -> None:
    at = server()
    client = AdmissionClient("a secret", replace(SERVED, **changed))
    reply = at.reply_to(client.prove(answered(at.reply_to(client.hello()))))
    assert reply is not None
    assert reply.admitted is None
    with pytest.raises(OtherModel, match="this one differs") as caught:
        client.member(reply.text)
    assert caught.value.differences == differences


@pytest.mark.parametrize(
    "text",
    ["", "nothing", "[]", "{}", '{"hello": 3}', '{"hello": "a/b"}', '{"hello": "ab", "proof": "1"}', '"hello"', "3"],
)
def test_what_is_no_message_is_not_answered(text: str) -> None:
    at = server()
    assert at.reply_to(text) is None
    assert at.ignored == 1


def test_an_admission_that_nobody_proved_is_not_believed() -> None:
    with pytest.raises(JoinRefused, match="not the supervisor"):
        AdmissionClient("a secret", SERVED).member(json.dumps({"member": 3, "proof": "0" * 64}))


def test_a_fingerprint_is_of_the_weights_their_type_and_the_versions() -> None:
    ballonet.install(budget="64MiB")
    try:
        device = devices.require()
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        found = fingerprint_of(model, device)
        assert Fingerprint.decode(found.encode()) == found
        assert (found.torch, found.dtype) == (torch.__version__, "float32 x 2")
        assert fingerprint_of(copy.deepcopy(model), device) == found
        with torch.no_grad():
            model.weight.mul_(1.5)
        assert [each.split()[0] for each in found.differences(fingerprint_of(model, device))] == ["weights"]
        assert found.differences(fingerprint_of(model.half(), device)) == ("dtype is float16 x 2, not float32 x 2",)
        del model
    finally:
        take_out()
