"""What may become of a piece: the table, and the sets of pieces that follow it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.residency.pieces import TABLE, PieceEvent, PieceState, PieceStates

PIECES = 12
EVENTS = st.tuples(st.sampled_from(PieceEvent), st.integers(0, PIECES), st.integers(0, PIECES))
UNDER_WAY = (PieceState.SAVING, PieceState.IN_SLOT, PieceState.ARRIVING)


def test_each_event_is_in_the_table() -> None:
    assert set(TABLE) == set(PieceEvent)
    assert {move.after for move in TABLE.values()} == set(PieceState)
    assert all(move.guard for move in TABLE.values())


def test_each_undo_goes_back() -> None:
    """From wherever an event leads, its undo leads to where an event of that kind may begin again."""
    undone = [move for move in TABLE.values() if move.undo is not None]
    assert {move.after for move in undone} == set(UNDER_WAY)
    for move in undone:
        assert move.undo is not None
        back = TABLE[move.undo]
        assert move.after in back.before
        assert back.after in move.before


def test_bytes_are_never_without_a_place() -> None:
    """Only the device has what is resident: such a piece is saved before it leaves, unless the core takes it, which
    copies. What only the backing has comes to the device before it is resident."""
    resident = {event for event, move in TABLE.items() if PieceState.RESIDENT in move.before}
    assert resident == {PieceEvent.SAVE, PieceEvent.TAKEN, PieceEvent.DROP}
    leaves = {
        event for event, move in TABLE.items() if PieceState.OFFLOADED in move.before and event is not PieceEvent.DROP
    }
    assert leaves == {PieceEvent.BIND, PieceEvent.FETCH, PieceEvent.MOVED}


@given(st.lists(EVENTS, max_size=30))
def test_sets_say_what_single_pieces_do(events: list[tuple[PieceEvent, int, int]]) -> None:
    states, model = PieceStates(), [PieceState.RESIDENT] * PIECES
    for event, one, other in events:
        first, end = min(one, other), max(one, other)
        states.move_run(event, first, end)
        for piece in range(first, end):
            if model[piece] in TABLE[event].before:
                model[piece] = TABLE[event].after
        assert [states.of(piece) for piece in range(PIECES)] == model
        for state in PieceState:
            if state is not PieceState.RESIDENT:
                pieces = {piece for piece in range(PIECES) if model[piece] is state}
                assert set(states[state]) == pieces
                assert states[state].count == len(pieces)
        runs = states.within(2, 9, PieceState.CLEAN, PieceState.OFFLOADED)
        there = {piece for run in runs for piece in range(*run)}
        assert there == {piece for piece in range(2, 9) if model[piece] in (PieceState.CLEAN, PieceState.OFFLOADED)}
