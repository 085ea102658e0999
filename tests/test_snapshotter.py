"""The public API of saving: what is due, what is refused, and what a receipt says."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.errors import ConfigError, SnapshotSkipped
from jaxft.group.manifest import SnapshotId
from jaxft.group.messages import Measured, Turn
from jaxft.receipt import Receipt, SkippedReceipt
from jaxft.schedule import parse_interval
from jaxft.status.events import EventReader
from tests.multiprocess.jax_world import WAIT_S
from tests.multiprocess.lone import Lone

STATE = {"x": jnp.arange(8.0), "n": 3}


# ------------------------------------------------------------------------ what is due


def test_every_so_many_steps(lone: Lone) -> None:
    with lone.open(every=3) as snapshotter:
        assert snapshotter.restore(STATE) is None
        receipts = [snapshotter.save(step, STATE) for step in range(1, 11)]
        begun = [receipt for receipt in receipts if receipt.id is not None]
        assert [receipt.step for receipt in begun] == [1, 4, 7, 10]
        assert all(0 <= receipt.wait_s <= receipt.stall_s > 0 for receipt in receipts)
        for receipt in begun:
            receipt.protected.result(WAIT_S)
            assert receipt.skipped is None
        skipped = receipts[1]
        assert skipped.skipped == "the next snapshot is due at step 4"
        for future in (skipped.staged, skipped.protected, skipped.persisted):
            with pytest.raises(SnapshotSkipped, match="step 2 was not saved: the next"):
                future.result(0)
        assert snapshotter.latest == 10


def test_a_call_that_is_known_not_to_be_due_looks_at_nothing(
    lone: Lone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until something is heard: then the next call is looked at closely."""
    monkeypatch.setenv("JAXFT_EVENTS", str(tmp_path))
    with lone.open(every=100) as snapshotter:
        assert snapshotter.restore(STATE) is None
        snapshotter.save(1, STATE).protected.result(WAIT_S)
        receipts = [snapshotter.save(step, STATE) for step in (2, 3)]
        receipts += [snapshotter.save(step, object(), object()) for step in (4, 5)]
        for receipt in receipts:
            assert isinstance(receipt, Receipt)
            assert receipt.skipped == "the next snapshot is due at step 101"
            assert (receipt.id, receipt.code) == (None, snapshotter.code)
            assert receipt.stall_s > receipt.wait_s == 0
            assert receipt.staged is receipt.staged
        snapshotter._due.hear(Turn(number=1, call=7))
        assert snapshotter.save(6, STATE).skipped is not None
        assert snapshotter.save(7, STATE).id is not None
    events = EventReader(tmp_path).poll()
    skipped = [event["step"] for event in events if event["event"] == "save_skipped"]
    assert skipped == [2, 3, 4, 5, 6]


def test_a_leaf_without_bytes_is_refused_and_the_next_snapshot_is_taken(lone: Lone) -> None:
    x = jnp.arange(8.0)
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    with lone.open(every=1) as snapshotter:
        assert snapshotter.restore({"x": x}) is None
        snapshotter.save(1, {"x": x}).protected.result(WAIT_S)
        with pytest.raises(ConfigError, match="is a ShapeDtypeStruct"):
            snapshotter.save(2, {"x": struct})
        after = snapshotter.save(3, {"x": x})
        after.protected.result(WAIT_S)
        assert "step 2" in str(after.last_failure)
        assert "is a ShapeDtypeStruct" in str(after.last_failure)


def test_what_fails_in_another_way_while_it_is_held_ends_the_snapshot_too(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lone.open(every=1) as snapshotter:
        assert snapshotter.restore(STATE) is None
        with monkeypatch.context() as patched:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patched.setattr("jaxft.snapshotter.stage_leaves", interrupted)
            with pytest.raises(KeyboardInterrupt):
                snapshotter.save(1, STATE)
        snapshotter.save(2, STATE).protected.result(WAIT_S)


def test_steps_that_are_jumped_over(lone: Lone) -> None:
    with lone.open(every=5) as snapshotter:
        begun = [step for step in (2, 6, 8, 9, 20, 21, 25) if snapshotter.save(step, STATE).id]
        assert begun == [2, 8, 20, 25]


def test_what_was_restored_counts_as_the_first_snapshot(lone: Lone) -> None:
    with lone.open(every=1) as snapshotter:
        snapshotter.save(7, STATE)
    with lone.open(every=4) as snapshotter:
        assert snapshotter.restore(STATE) is not None
        assert [step for step in range(8, 17) if snapshotter.save(step, STATE).id] == [11, 15]


def test_a_time_is_turned_into_steps_by_the_root(lone: Lone) -> None:
    """Steps of 10 ms, by a clock that stands still: 50 ms are five of them."""
    with lone.open(every="50ms") as snapshotter:
        schedule = snapshotter._due.schedule
        begun = []
        for step in range(1, 40):
            schedule.step_s = 0.0
            schedule._last_call = None
            schedule.called(step - 1, 0.0)
            receipt = _save_at(snapshotter, step, now_s=0.010)
            if receipt.id is not None:
                receipt.protected.result(WAIT_S)
                begun.append(step)
    # The first two intervals are decided before anybody has said how long a step takes.
    assert begun == [1, 2, 7, 12, 17, 22, 27, 32, 37]


def test_a_budget_is_turned_into_steps_by_the_root(lone: Lone) -> None:
    """50 s are half of twenty steps of 5 s."""
    with lone.open(every=jaxft.Auto(overhead=0.5)) as snapshotter:
        assert snapshotter._due.meter is not None
        told = Measured(cost_s=50.0, protect_s=1.0, step_s=5.0)
        snapshotter._due.meter.measured = lambda: told  # type: ignore[method-assign]
        begun = [step for step in range(1, 53) if snapshotter.save(step, STATE).id is not None]
    # The interval to the first snapshot is decided before anybody has said what one costs.
    assert begun == [1, 11, 31, 51]


def test_what_a_rank_measures_is_of_its_own_steps(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two snapshots do not count, and what the third one cost is known with the fourth.
    The state is waited for in the due call, while the snapshot is on its way, and some more."""
    waits: list[Any] = []
    monkeypatch.setattr("jaxft.saving.due.wait_computed", waits.append)
    with lone.open(every=jaxft.Auto(overhead=0.01)) as snapshotter:
        assert snapshotter._due.meter is not None
        for step in range(1, 32):
            assert snapshotter._due.meter.measured() == Measured()
            receipt = snapshotter.save(step, {"step": step})
            if receipt.id is not None:
                receipt.protected.result(WAIT_S)
        found = snapshotter._due.meter.measured()
    assert min(found.cost_s, found.step_s, found.protect_s) > 0
    waited = [wait["step"] for wait in waits]
    assert waited == [*range(1, 6), *range(11, 16), *range(21, 26), 31]


def _save_at(snapshotter: jaxft.Snapshotter, step: int, now_s: float) -> Receipt:
    called = snapshotter._due.schedule.called
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshotter._due.schedule, "called", lambda step, _: called(step, now_s))
        return snapshotter.save(step, STATE)


@pytest.mark.parametrize(
    ("every", "parsed"),
    [(1, (1, 0)), (25, (25, 0)), ("200ms", (0, 0.2)), ("1.5 s", (0, 1.5)), ("2min", (0, 120))],
)
def test_intervals(every: int | str, parsed: tuple[int, float]) -> None:
    assert parse_interval(every) == parsed


# ------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0: expected at least 1 step"),
        ({"every": True}, "every=True: expected a number of steps or a time"),
        ({"every": 2.5}, "every=2.5: expected a number of steps or a time"),
        ({"every": "soon"}, 'every="soon": expected a time like "500ms"'),
        ({"every": "0s"}, 'every="0s": expected a time'),
        ({"every": "3m"}, 'every="3m": expected a time'),
        ({"staging": "disk"}, "staging='disk': expected one of view, pinned_host, device"),
        ({"parity": "gpu"}, """parity='gpu' (or JAXFT_PARITY): expected "host" or "device\""""),
        ({"timeout_s": 0}, "timeout_s=0: expected more than 0"),
        ({"save_wait_s": -1}, "save_wait_s=-1: expected more than 0"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(jaxft.ConfigError, match=re.escape(message)):
        jaxft.Snapshotter(**options)


def test_the_environment_may_say_who_computes_parity(
    lone: Lone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One host has no other that could hold any: nothing of its plans is different, and it is said
    once."""
    monkeypatch.setenv("JAXFT_PARITY", "device")
    with lone.open(every=1) as snapshotter:
        assert snapshotter.parity == "device"
        receipt = snapshotter.save(0, {"x": jnp.zeros((64, 900))})
        receipt.protected.result(WAIT_S)
        assert receipt.parity == "host"
        assert snapshotter.rings is None
    (warning,) = [one for one in caplog.messages if "parity" in one]
    assert 'parity="device": there is no parity in this world of one host' in warning
    with lone.open(every=1, parity="host") as snapshotter:
        assert snapshotter.parity == "host"


def test_another_job_than_the_agents(lone: Lone) -> None:
    with pytest.raises(jaxft.ConfigError, match=r'job="other".*"test"'):
        lone.open(job="other")
    with lone.open(job="test") as snapshotter:
        assert snapshotter.env.job == "test"


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ((1, 2), "extras is a builtins.tuple"),
        ({"a": [1, {"b": np.float32(1)}]}, r"extras['a'][1]['b'] is a numpy.float32"),
        ({"a": bytearray(b"x")}, "extras['a'] is a builtins.bytearray"),
        ({("a",): 1}, "the key ('a',) of extras is a builtins.tuple"),
        ([2**70], "extras cannot be kept"),
        (["\ud800"], "extras cannot be kept"),
        (jnp.ones(2), "put arrays into the state"),
    ],
)
def test_extras_that_would_not_come_back(lone: Lone, extras: Any, message: str) -> None:
    with lone.open(every=1) as snapshotter:
        with pytest.raises(jaxft.ConfigError, match=re.escape(message)):
            snapshotter.save(1, STATE, extras)
        snapshotter.save(1, STATE, [1, {"b": 2}]).protected.result(WAIT_S)


def test_a_leaf_that_cannot_be_saved_is_refused_and_nothing_has_begun(lone: Lone) -> None:
    with lone.open(every=1) as snapshotter:
        snapshotter.save(1, STATE)
        with pytest.raises(jaxft.ConfigError, match=r"leaf \['f'\] is a builtins.object"):
            snapshotter.save(2, {**STATE, "f": object()})
        receipt = snapshotter.save(3, STATE)
        assert receipt.id == SnapshotId(snapshotter.env.generation, 1, snapshotter.env.nonce)


def test_steps_are_integers_of_any_kind(lone: Lone) -> None:
    with lone.open(every=1) as snapshotter:
        with pytest.raises(jaxft.ConfigError, match=r"step=1\.0: expected an integer"):
            snapshotter.save(1.0, STATE)  # type: ignore[arg-type]
        for step in (np.int64(1), jnp.int32(2), 3):
            receipt = snapshotter.save(step, STATE)  # type: ignore[arg-type]
            assert type(receipt.step) is int
            receipt.protected.result(WAIT_S)
        assert snapshotter.latest == 3


def test_order_of_calls(lone: Lone) -> None:
    snapshotter = lone.open(every=1)
    assert snapshotter.restore(STATE) is None
    with pytest.raises(jaxft.ConfigError, match="restore comes once"):
        snapshotter.restore(STATE)
    snapshotter.save(1, STATE)
    with pytest.raises(jaxft.ConfigError, match="before the first save"):
        snapshotter.restore(STATE)
    snapshotter.close()
    snapshotter.close()
    with pytest.raises(jaxft.ConfigError, match="save was called after close"):
        snapshotter.save(2, STATE)
    with pytest.raises(jaxft.ConfigError, match="before close"):
        snapshotter.restore(STATE)


def test_save_before_restore_warns_where_there_is_something(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    with lone.open(every=1) as snapshotter:
        snapshotter.save(1, STATE)
    assert caplog.text == ""
    with lone.open(every=1) as snapshotter:
        snapshotter.save(2, STATE)
        with pytest.raises(jaxft.ConfigError, match="restore comes once"):
            snapshotter.restore(STATE)
    assert re.search("save was called before restore.*of step 1.*fresh=True", caplog.text)


def test_fresh_leaves_the_old_behind_without_a_word(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    with lone.open(every=1) as snapshotter:
        snapshotter.save(10, STATE)
    with lone.open(every=1, fresh=True) as snapshotter:
        assert snapshotter.restore({"other": jnp.ones(1)}) is None
        snapshotter.save(1, {"other": jnp.ones(1)})
    with lone.open(every=1) as snapshotter:
        restored = snapshotter.restore({"other": jnp.zeros(1)})
        assert restored is not None
        assert restored.step == 1
    assert caplog.text == ""


# ------------------------------------------------------------------------ how it ends


def test_close_waits_for_the_last_snapshot(lone: Lone) -> None:
    with lone.open(every=1) as snapshotter:
        receipt = snapshotter.save(1, STATE)
    receipt.protected.result(0)
    with pytest.raises(SnapshotSkipped, match="not chosen for storage"):
        receipt.persisted.result(0)


def test_the_users_error_is_not_hidden(lone: Lone, caplog: pytest.LogCaptureFixture) -> None:

    def script() -> None:
        with lone.open(every=1, faults="stage.granted:seq=0=raise") as snapshotter:
            receipt = snapshotter.save(1, STATE)
            assert isinstance(receipt.protected.exception(WAIT_S), jaxft.StagingError)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert errors[-1].startswith("while the script was failing: host h0, step 1")


def test_a_checkpoint_in_the_making_is_not_known_after_close(lone: Lone) -> None:
    with lone.open(every=1) as snapshotter:
        receipt = Receipt(1, snapshotter.code)
        receipt.protect()
        snapshotter._receipts.open(99, receipt)
    with pytest.raises(jaxft.SnapshotLost, match=r"host h0, step 1: .*closed before it was known"):
        receipt.persisted.result(0)


def test_leaving_without_having_saved(lone: Lone) -> None:
    with lone.open() as snapshotter:
        pass
    with lone.open() as snapshotter:
        snapshotter.restore(STATE)
        assert snapshotter.latest is None


def test_no_thread_stays(lone: Lone) -> None:
    before = set(threading.enumerate())
    with lone.open(every=1) as snapshotter:
        snapshotter.save(1, STATE)
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


# ------------------------------------------------------------------------ receipts


def test_a_receipt_can_be_read(lone: Lone) -> None:
    code = jaxft.Code(data=3, parity=1)
    receipt = Receipt(5, code)
    receipt.id = SnapshotId(2, 7, "ab")
    assert (
        repr(receipt)
        == "Receipt(step=5, id=2.7, staged=pending, protected=pending, persisted=pending, "
        "parity='host')"
    )
    receipt.stage()
    receipt.protect()
    receipt.fail(jaxft.SnapshotError("x"))
    assert "staged=yes, protected=yes, persisted=no" in repr(receipt)
    skipped = SkippedReceipt(6, code, "not due", None)
    assert repr(skipped) == "Receipt(step=6, skipped='not due')"
    with lone.open(every=1) as snapshotter:
        assert snapshotter.save(1, STATE).code.parity == 0  # a lone host


def test_a_receipt_is_ended_once() -> None:
    receipt = Receipt(5, jaxft.Code())
    receipt.staged.cancel()
    receipt.fail(jaxft.SnapshotLost("first"))
    receipt.fail(jaxft.SnapshotLost("second"))
    receipt.protect()
    with pytest.raises(jaxft.SnapshotLost, match="first"):
        receipt.protected.result(0)
    with pytest.raises(CancelledError):
        receipt.staged.result(0)
    assert "staged=no" in repr(receipt)


def test_a_callback_hears_of_it(lone: Lone) -> None:
    heard = threading.Event()
    with lone.open(every=1) as snapshotter:
        snapshotter.save(1, STATE).protected.add_done_callback(lambda _: heard.set())
        assert heard.wait(WAIT_S)
