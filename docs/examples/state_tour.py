"""Every type of state, through a checkpoint, kill -9 and a start at another parallelism.

::

    python docs/examples/state_tour.py FOLDER PARALLELISM [WORKING_FOLDER]

Each run prints the state that it finds, adds one line of text to it, takes a checkpoint, adds
another line that no checkpoint holds, and kills itself with SIGKILL. Run it again on the same
folder at any other parallelism: what was checkpointed is there, and nothing else. With a working
folder the keyed state is kept in LMDB on local disk instead of in memory.
"""

# ruff: noqa: T201
import datetime as dt
import os
import signal
import sys

from flowstate import (
    AggregatingStateDescriptor,
    ListStateDescriptor,
    LocalOperator,
    MapStateDescriptor,
    Reducer,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)

COUNT = ValueStateDescriptor("count", int, default=0)
PLACES = ListStateDescriptor("places", int)
NEXT = MapStateDescriptor("next", str, int)
LAST = ReducingStateDescriptor("last", Reducer.MAX, int)
MEAN = AggregatingStateDescriptor(
    "mean", Reducer.MEAN, int, ttl=StateTtlConfig(ttl=dt.timedelta(days=1))
)
WORDS = ListStateDescriptor("words", str)
OWNERS = ListStateDescriptor("owners", str)
RULES = MapStateDescriptor("rules", str, str)


def write(operator: LocalOperator, line: str) -> None:
    """Add the words of a line, which are the keys, to every type of state."""
    words = line.split()
    for place, (word, following) in enumerate(zip(words, [*words[1:], "."], strict=True)):
        subtask = operator.subtask_of(word)  # the one that owns the key, with the key set
        count = subtask.keyed.get_state(COUNT)
        count.update(count.value() + 1)
        subtask.keyed.get_list_state(PLACES).add(place)
        subtask.keyed.get_map_state(NEXT).put(following, place)
        subtask.keyed.get_reducing_state(LAST).add(place)
        subtask.keyed.get_aggregating_state(MEAN).add(place)
        subtask.keyed.timer_service.register_event_time_timer(1000 * place)
        subtask.operator.get_list_state(WORDS).add(word)
    for index, subtask in enumerate(operator.subtasks):
        # A restored union list has the elements of all subtasks: keep only the own one.
        subtask.operator.get_union_list_state(OWNERS).update([f"subtask {index}"])
        subtask.operator.get_broadcast_state(RULES).put("line", line)


def show(operator: LocalOperator) -> None:
    """Print every type of state, and let the timers up to 2000 fire."""
    for index, subtask in enumerate(operator.subtasks):
        keyed, state = subtask.keyed, subtask.operator
        count, places = keyed.get_state(COUNT), keyed.get_list_state(PLACES)
        following, last = keyed.get_map_state(NEXT), keyed.get_reducing_state(LAST)
        mean = keyed.get_aggregating_state(MEAN)
        for key in sorted(keyed.keys("count")):
            keyed.set_current_key(key)
            print(f"{index} key {key}: count {count.value()}, places {places.get()},", end=" ")
            print(f"next {sorted(following.items())}, last {last.get()}, mean {mean.get()}")
        for timer in keyed.timer_service.advance_watermark(2000):
            print(f"{index} timer of {timer.key} at {timer.timestamp}")
        print(f"{index} list {state.get_list_state(WORDS).get()}")
        print(f"{index} union {state.get_union_list_state(OWNERS).get()}")
        print(f"{index} broadcast {state.get_broadcast_state(RULES).items()}")


def main(folder: str, parallelism: int, working_folder: str | None = None) -> None:
    """Run until the kill."""
    operator = LocalOperator(
        folder, parallelism=parallelism, key_type=str, working_folder=working_folder
    )
    restored = operator.record
    print(f"restored: {'nothing' if restored is None else f'checkpoint {restored.checkpoint_id}'}")
    show(operator)
    write(operator, "to be or not to be")
    print(f"committed: checkpoint {operator.checkpoint().checkpoint_id}")
    write(operator, "no checkpoint has this line")
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: {sys.argv[0]} FOLDER PARALLELISM [WORKING_FOLDER]")
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
