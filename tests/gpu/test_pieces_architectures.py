"""Every decoder of the suite decodes to stock's tokens and logits, most by pieces of CUDA graphs, every other one says
why it does not."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

import ballonet

from .. import models
from ..architectures.decoders import DECODERS, EXPERT_MODELS, PLAIN
from ..architectures.recurrent import RECURRENT
from .decoding import LONG, SHORT, answer, apart, prompt
from .scene import Place, play

NAMES = (*PLAIN, *DECODERS, *EXPERT_MODELS, *RECURRENT)
AT_ONCE = 9  # architectures of a scene: a process of its own takes longer than a tiny model
REPLAYING = 80  # that decode by graphs at least
PARTS = 9  # of the tokens of a call that is enough to replay some


def decode(place: Place, names: tuple[str, ...], told: str) -> None:
    """Writes how each of the architectures decodes, and why not by finer cuts, to the file `told`."""
    wrong: list[str] = []
    how: dict[str, tuple[str, str]] = {}
    for name in names:
        model = models.build(name).to(place.kind)
        asked = [prompt(name, place, longest, padded=longest == SHORT) for longest in (LONG, SHORT)]
        expected = [answer(model, given, PARTS) for given in asked]
        with ballonet.manage(model) as managed:
            for which in (0, 0, 1):
                if said := apart(answer(model, asked[which], PARTS), expected[which]):
                    wrong.append(f"{name}, {'padded' if which else 'plain'}: {said}")
            pieces = managed.report().pieces
            how[name] = (pieces.way, pieces.why) if pieces.replayed else ("eager", pieces.why or "no reason")
        del model, expected, asked
        gc.collect()
        place.synchronize()
    Path(told).write_text(json.dumps(how))
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
def test_decoders_replay_or_say_why(tmp_path: Path) -> None:
    how: dict[str, tuple[str, str]] = {}
    wrong: list[str] = []
    for first in range(0, len(NAMES), AT_ONCE):
        told = tmp_path / str(first)
        try:
            play(decode, "cuda", pages=128, names=NAMES[first : first + AT_ONCE], told=str(told))
        except AssertionError as error:
            wrong.append(str(error))
        how |= json.loads(told.read_text()) if told.exists() else {}
    assert not wrong, "\n".join(wrong)
    print("\n".join(f"{name}: {way} {why}" for name, (way, why) in how.items()))
    eager = {name: why for name, (way, why) in how.items() if way == "eager"}
    assert len(how) == len(NAMES)
    assert len(how) - len(eager) >= REPLAYING, eager
    assert "no reason" not in eager.values(), eager
