"""The validator: a table of rules that yield sentences about problems of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from merak.core.errors import ScheduleError
from merak.schedule.action_table import tabulate
from merak.schedule.builders.forward_only import forward_only
from merak.schedule.ir import FINAL_KINDS, GRADIENT_KINDS, Action, Kind, Schedule
from merak.schedule.lower import lower
from merak.schedule.simulator import memory
from merak.schedule.validate.steps import check_steps

_MOST_PROBLEMS = 20

Rule = Callable[[Schedule], Iterator[str]]


def validate(schedule: Schedule) -> tuple[str, ...]:
    """Find the problems that keep a schedule from running or from right gradients.

    Rules come in steps, each of which relies on the ones before: a step's problems end the search.

    Returns:
        Sentences, the first 20 at most; none for a valid schedule.
    """
    for rules in RULES:
        problems = (problem for rule in rules for problem in rule(schedule))
        found = tuple(islice(problems, _MOST_PROBLEMS))
        if found:
            return found
    return ()


def check(schedule: Schedule) -> None:
    """Refuse an invalid schedule.

    Raises:
        ScheduleError: with the first problem, and how many others there are.
    """
    problems = validate(schedule)
    if problems:
        others = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise ScheduleError(f"The schedule {schedule.name} is invalid: {problems[0]}{others}")


def check_in_flight(schedule: Schedule, limit: float) -> None:
    """Refuse a schedule that holds too many microbatches on a rank.

    Raises:
        ScheduleError: with the rank, the action where it happens, and the least limit that fits.
    """
    table = tabulate(schedule)
    levels = memory.in_flight(table)
    peak = int(levels.max(initial=0))
    if peak <= limit:
        return
    index = int((levels > limit).argmax())
    where = _where(schedule, int(table.rank[index]), index - table.starts[int(table.rank[index])])
    raise ScheduleError(
        f"{schedule.name} does not fit the limit of {limit:g} microbatches in flight: {where} "
        f"brings its rank to {levels[index]}. The least limit it fits is {peak}."
    )


def _where(schedule: Schedule, rank: int, position: int) -> str:
    action = schedule.actions[rank][position]
    return f"{schedule.label(action)} at position {position} of rank {rank}"


def _each(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            yield rank, position, action


def _pipes_cover_the_ranks(schedule: Schedule) -> Iterator[str]:
    if not (schedule.pipes and schedule.actions and schedule.microbatch_pipes):
        yield "it needs at least one pipe, one rank and one microbatch."
        return
    for number, pipe in enumerate(schedule.pipes):
        if len(pipe) != schedule.num_stages:
            yield f"pipe {number} places {len(pipe)} stages; the model has {schedule.num_stages}."
        for stage, rank in enumerate(pipe):
            if not 0 <= rank < schedule.num_ranks:
                yield (
                    f"pipe {number} puts stage {stage} on rank {rank}; "
                    f"ranks are 0 to {schedule.num_ranks - 1}."
                )
    held = {rank for pipe in schedule.pipes for rank in pipe}
    for rank in range(schedule.num_ranks):
        if rank not in held:
            yield f"rank {rank} holds no stage; give it one or leave it out."
    for microbatch, pipe_number in enumerate(schedule.microbatch_pipes):
        if not 0 <= pipe_number < len(schedule.pipes):
            yield f"microbatch {microbatch} goes through pipe {pipe_number}, which does not exist."


def _fields_have_a_value_per_stage(schedule: Schedule) -> Iterator[str]:
    if len(schedule.eager_reduction) != schedule.num_stages:
        yield (
            f"eager_reduction has {len(schedule.eager_reduction)} values; "
            f"the model has {schedule.num_stages} stages."
        )
    if schedule.weight_versions and len(schedule.weight_versions) != schedule.num_stages:
        yield (
            f"weight_versions has {len(schedule.weight_versions)} rows; "
            f"the model has {schedule.num_stages} stages."
        )
    for stage, versions in enumerate(schedule.weight_versions):
        if len(versions) != schedule.num_microbatches:
            yield (
                f"weight_versions of stage {stage} has {len(versions)} values; "
                f"there are {schedule.num_microbatches} microbatches."
            )
    per_update = schedule.microbatches_per_update
    if not 1 <= per_update <= schedule.num_microbatches:
        yield (f"it updates every {per_update} microbatches; use 1 to {schedule.num_microbatches}.")
    elif schedule.is_synchronous and per_update != schedule.num_microbatches:
        yield (
            f"it updates every {per_update} of {schedule.num_microbatches} microbatches and does "
            f"not say which weight version each one uses; give weight_versions."
        )


def _actions_are_on_the_rank_of_their_stage(schedule: Schedule) -> Iterator[str]:
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    for rank, position, action in _each(schedule):
        if not 0 <= action.stage < num_stages:
            where = _where(schedule, rank, position)
            yield f"{where} is on a stage that does not exist; there are {num_stages}."
        elif not 0 <= action.microbatch < num_microbatches:
            where = _where(schedule, rank, position)
            yield f"{where} is of a microbatch that does not exist; there are {num_microbatches}."
        elif (owner := schedule.rank_of(action.stage, action.microbatch)) != rank:
            where = _where(schedule, rank, position)
            yield f"{where} belongs on rank {owner}, which holds the stage for its microbatch."


def _every_action_once(schedule: Schedule) -> Iterator[str]:
    counts = Counter(action for _, _, action in _each(schedule))
    for rank, position, action in _each(schedule):
        if counts[action] > 1:
            yield f"{_where(schedule, rank, position)} is one of {counts[action]}; keep one."
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found = {k.value for k in Kind if counts[Action(k, stage, microbatch)]}
            on = f"microbatch {microbatch} on stage {stage}"
            rank = schedule.rank_of(stage, microbatch)
            if "F" not in found:
                yield f"{on} has no forward; add it to rank {rank}."
            if "B" not in found and not {"I", "W"} <= found:
                yield f"{on} has no complete backward; give rank {rank} a B, or an I and a W."
            if "B" in found and found & {"I", "W"}:
                yield f"{on} has a B beside an I or W on rank {rank}; keep one or the other."
            if "R" in found and not schedule.recompute[stage]:
                yield f"{on} has an R on rank {rank}, but the stage saves its activations."


def _own_order(schedule: Schedule) -> Iterator[str]:
    """Order of a microbatch's actions: F, then R, then B or I, then W."""
    places = {Kind.FORWARD: 0, Kind.RECOMPUTE: 1, Kind.WEIGHT_GRADIENT: 3}
    done: dict[tuple[int, int], tuple[int, Action]] = {}
    for rank, position, action in _each(schedule):
        place = places.get(action.kind, 2)
        key = action.stage, action.microbatch
        last, earlier = done.get(key, (-1, action))
        if place < last:
            before = schedule.label(earlier)
            yield f"{_where(schedule, rank, position)} comes after {before}; put it before."
        elif place > 0 and last < 0:
            yield f"{_where(schedule, rank, position)} comes before its forward; put it after."
        done[key] = max((last, earlier), (place, action), key=lambda item: item[0])


def _ranks_do_not_wait_for_one_another(schedule: Schedule) -> Iterator[str]:
    try:
        steps = lower(schedule)
    except ScheduleError as error:
        yield str(error)
        return
    yield from check_steps(schedule, steps)


def _evaluations_complete(schedule: Schedule) -> Iterator[str]:
    """An evaluation through the stages of the first pipe hangs nowhere either."""
    most = max(2, schedule.num_microbatches)
    evaluation = forward_only(schedule.pipes[0], schedule.num_ranks, most)
    for problem in check_steps(evaluation, lower(evaluation)):
        yield f"in an evaluation of {most} microbatches, {problem}"


def _weight_versions_exist(schedule: Schedule) -> Iterator[str]:
    """Weight versions exist when their forward runs, and never get older again."""
    if schedule.is_synchronous:
        return
    for stage, eager in enumerate(schedule.eager_reduction):
        if not eager:
            yield f"stage {stage} is not reduced eagerly; asynchronous stages must be."
    finished: Counter[int] = Counter()
    newest: dict[int, int] = {}
    for rank, position, action in _each(schedule):
        stage = action.stage
        if action.kind in FINAL_KINDS:
            finished[stage] += 1
        elif action.kind is Kind.FORWARD:
            version = schedule.weight_version(stage, action.microbatch)
            # Backwards come in the order of updates: another rule.
            made = finished[stage] // schedule.microbatches_per_update
            if not 0 <= version <= made:
                where = _where(schedule, rank, position)
                yield f"{where} uses weight version {version}; {made} updates are done by then."
            if version < newest.get(stage, 0):
                where = _where(schedule, rank, position)
                yield f"{where} uses weight version {version} after version {newest[stage]}."
            newest[stage] = max(version, newest.get(stage, 0))


def _asynchronous_stages_have_one_rank(schedule: Schedule) -> Iterator[str]:
    if schedule.is_synchronous:
        return
    for stage in range(schedule.num_stages):
        ranks = schedule.ranks_of(stage)
        if len(ranks) > 1:
            yield (
                f"stage {stage} is asynchronous and lives on ranks {', '.join(map(str, ranks))}; "
                f"put it on one."
            )


def _backwards_come_in_update_order(schedule: Schedule) -> Iterator[str]:
    if schedule.is_synchronous:
        return
    last: dict[int, int] = {}
    for rank, position, action in _each(schedule):
        if action.kind not in GRADIENT_KINDS | FINAL_KINDS:
            continue
        update = schedule.update_of(action.microbatch)
        if action.kind in FINAL_KINDS and update < last.get(action.stage, 0):
            yield (
                f"{_where(schedule, rank, position)} is of update {update} and comes after one of "
                f"update {last[action.stage]}; finish an update before the next."
            )
        if action.kind in FINAL_KINDS:
            last[action.stage] = max(update, last.get(action.stage, 0))


RULES: tuple[tuple[Rule, ...], ...] = (
    (_pipes_cover_the_ranks,),
    (_fields_have_a_value_per_stage, _actions_are_on_the_rank_of_their_stage),
    (_every_action_once, _own_order),
    (_asynchronous_stages_have_one_rank, _backwards_come_in_update_order, _weight_versions_exist),
    (_ranks_do_not_wait_for_one_another, _evaluations_complete),
)
