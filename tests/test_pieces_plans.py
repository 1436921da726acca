"""What the next forward of a key does, by what is known of those before. Recipes are texts; `program`s are nothing."""

from __future__ import annotations

from itertools import count

from ballonet.hooks.pieces.plans import CHANGES, PROOFS, VARIANTS, Act, KeyPlan, Variant

LONG = 100  # forwards that a call is likely to make


lengths = count()  # of forwards, each another one


def difference(first: str, second: str) -> str:
    return "" if first == second else f"{first} is not {second}"


def noted(plan: KeyPlan, call: object, recipe: str = "a") -> tuple[Variant, str]:
    """Records a forward as the runner does: what is seen for the second time gets a program, and is proved."""
    assert plan.next(call, LONG, True) is Act.RECORD
    variant, why = plan.recorded(call, recipe, difference)
    if variant.program is not None or variant.recipe is not recipe:
        variant.program = variant.program or object()
        variant.lengths.add(next(lengths))
    return variant, why


def text(letter: str) -> str:
    """A recipe of its own, equal to all others of that letter."""
    return "".join([letter, "!"])


def replaying(call: object) -> KeyPlan:
    plan = KeyPlan()
    for _ in range(1 + PROOFS):
        noted(plan, call, text("a"))
    return plan


def test_forwards_of_a_key_are_recorded_captured_proved_and_then_replayed() -> None:
    plan, call = KeyPlan(), object()
    acts = []
    for _ in range(5):
        acts.append(plan.next(call, LONG, True))
        if acts[-1] is Act.RECORD:
            noted(plan, call, text("a"))
    assert acts == [Act.RECORD] * (1 + PROOFS) + [Act.REPLAY] * 2
    assert len(plan.variants) == 1
    assert plan.variants[0].proofs == PROOFS


def test_a_variant_without_its_second_proof_is_not_replayed() -> None:
    plan, call = KeyPlan(), object()
    noted(plan, call, text("a"))
    noted(plan, call, text("a"))
    assert plan.variants[0].proofs == 1 < PROOFS
    assert not plan.replays(call)


def test_comparisons_at_one_length_are_one_proof() -> None:
    plan, call = KeyPlan(), object()
    noted(plan, call, text("a"))
    variant, _ = plan.recorded(call, text("a"), difference)
    variant.program = object()
    for _ in range(PROOFS + 1):
        variant.lengths.add(9)
    assert plan.next(call, LONG, True) is Act.RECORD
    variant.lengths.add(10)
    assert plan.next(call, LONG, True) is Act.REPLAY


def test_a_captured_variant_that_was_never_compared_is_not_replayed() -> None:
    plan, call = KeyPlan(), object()
    for _ in range(2):
        plan.recorded(call, "a", difference)
    plan.variants[0].program = object()
    assert plan.next(call, LONG, True) is Act.RECORD


def test_first_forward_of_each_later_call_is_recorded() -> None:
    first, second = object(), object()
    plan = replaying(first)
    assert plan.replays(first)
    assert plan.next(second, LONG, True) is Act.RECORD
    assert not plan.replays(second)
    noted(plan, second, text("a"))
    assert plan.next(second, LONG, True) is Act.REPLAY
    assert plan.next(first, LONG, True) is Act.RECORD, "something may have changed since its last forward"


def test_calls_of_fewer_than_four_tokens_record_nothing() -> None:
    for tokens in range(1, 6):
        forwards_left = tokens  # those of the prompt's is behind it: one token comes of each
        assert (KeyPlan().next(object(), forwards_left, True) is Act.RECORD) == (tokens > PROOFS + 1)


def test_call_that_ends_before_a_replay_is_eager_though_it_has_begun() -> None:
    plan, call = KeyPlan(), object()
    noted(plan, call, text("a"))
    assert plan.next(call, PROOFS, True) is Act.EAGER
    assert plan.next(call, PROOFS + 1, True) is Act.RECORD


def test_known_variant_is_recorded_only_where_a_replay_can_follow() -> None:
    plan = replaying(object())
    assert plan.next(object(), 1, True) is Act.EAGER
    assert plan.next(object(), 2, True) is Act.RECORD


def test_shortage_keeps_new_variants_eager_and_old_ones_replaying() -> None:
    call = object()
    assert KeyPlan().next(call, LONG, False) is Act.EAGER
    plan = replaying(call)
    assert plan.next(call, LONG, False) is Act.REPLAY
    assert plan.next(object(), LONG, False) is Act.RECORD, "a comparison captures nothing"


def test_variant_that_comes_back_keeps_its_program() -> None:
    plan, programs = KeyPlan(), []
    for letter in "aabbab":
        for _ in range(3):
            call = object()
            variant, why = noted(plan, call, text(letter))
            assert not why
        programs.append(variant.program)
        assert plan.variants[0] is variant
    assert len(plan.variants) == 2
    assert programs[0] is programs[1] is programs[4]
    assert programs[2] is programs[3] is programs[5]
    assert programs[0] is not programs[2]


def test_changed_forward_is_another_variant_that_is_recorded_again() -> None:
    first, second = object(), object()
    plan = replaying(first)
    changed, why = noted(plan, second, text("b"))
    assert (changed.program, changed.proofs, why) == (None, 0, "")
    assert not plan.replays(second)
    assert plan.next(second, LONG, True) is Act.RECORD


def test_forward_that_changes_at_every_length_says_why_within_one_call() -> None:
    plan, call = KeyPlan(), object()
    said = [plan.recorded(call, f"length {length}", difference)[1] for length in range(CHANGES + 1)]
    assert said == [""] * CHANGES + [f"length {CHANGES - 1} is not length {CHANGES}"]
    assert len(plan.variants) == 1, "recordings that were seen once are not kept"


def test_changes_of_other_calls_do_not_count() -> None:
    plan = KeyPlan()
    for number in range(3 * CHANGES):
        assert not plan.recorded(object(), f"recipe {number}", difference)[1]


def test_variants_that_were_not_computed_for_longest_are_forgotten() -> None:
    plan, forgotten = KeyPlan(), list[object]()
    for number in range(2 * VARIANTS):
        for _ in range(2):
            noted(plan, object(), f"recipe {number}")
            forgotten += [variant.recipe for variant in plan.pop_surplus()]
    assert forgotten == [f"recipe {number}" for number in range(VARIANTS)]
    assert [variant.recipe for variant in plan.variants] == [
        f"recipe {number}" for number in range(2 * VARIANTS - 1, VARIANTS - 1, -1)
    ]
