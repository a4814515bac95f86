"""Stops the segment in flight at an instant: iterations that have ended are accounted for."""

import math

from shared.simulation.iteration import advance_iterations, cut_segment, elapsed_s
from shared.simulation.kernel_state import EngineState
from shared.simulation.kv_blocks import growth_blocks, take_blocks
from shared.simulation.tables import Tables


def sync_segment(
    tables: Tables,
    engine: EngineState,
    now_s: float,
) -> None:
    """Bring the state up to `now_s`, which lies before the end of the segment in flight.

    Afterwards the first iteration of the segment is the one in flight, or, when an iteration
    ends at `now_s` exactly, there is no segment and the next is planned later.
    """
    if engine.iterations == 0:
        return
    done = _iterations_done(engine, now_s)
    if done == 0:
        return
    _leave_behind(tables, engine, done)
    if engine.clock_s >= now_s:
        engine.iterations = 0
        engine.end_s = math.inf
        return
    _go_on(tables, engine, done)


def end_with_present(
    tables: Tables,
    engine: EngineState,
    now_s: float,
) -> None:
    """Let the segment end with its first iteration that does not end before `now_s`.

    What follows is planned anew, with the coefficients that the instance has by then.
    """
    if engine.iterations <= 1:
        return
    done = _iterations_done(engine, now_s)
    if done > 0 and engine.start_s + elapsed_s(engine, done) >= now_s:
        done -= 1
    if done > 0:
        _leave_behind(tables, engine, done)
        _go_on(tables, engine, done)
    cut_segment(engine)


def _leave_behind(tables: Tables, engine: EngineState, done: int) -> None:
    """Account for iterations that have ended; the clock is at the end of the last one."""
    advance_iterations(tables, engine, done)
    boundary_s = engine.start_s + elapsed_s(engine, done)
    engine.busy_s += boundary_s - engine.start_s
    engine.clock_s = boundary_s
    engine.iterations -= done


def _go_on(tables: Tables, engine: EngineState, done: int) -> None:
    """Let the rest of the segment start at the clock."""
    engine.start_s = engine.clock_s
    engine.linear_s += engine.quadratic_s * done
    take_blocks(tables, engine, growth_blocks(tables, engine, 0, 1))


def _iterations_done(engine: EngineState, now_s: float) -> int:
    """Return how many iterations of the segment have ended at `now_s` (fewer than all)."""
    elapsed = now_s - engine.start_s
    half = engine.linear_s + 0.5 * engine.quadratic_s
    if engine.quadratic_s > 0.0:
        root = math.sqrt(half * half + 2.0 * engine.quadratic_s * elapsed)
        guess = 2.0 * elapsed / (half + root)
    else:
        guess = elapsed / half
    done = min(int(guess), engine.iterations - 1)
    while done > 0 and engine.start_s + elapsed_s(engine, done) > now_s:
        done -= 1
    while done < engine.iterations - 1 and engine.start_s + elapsed_s(engine, done + 1) <= now_s:
        done += 1
    return done
