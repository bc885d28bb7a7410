"""The queue of jobs."""

from __future__ import annotations

import pytest

from kvstore.scheduler.job_queue import Job, JobQueue


def jobs(*names: str) -> list[Job]:
    """Job "a2" is the second turn of session "a"."""
    return [Job(name[0], tuple(range(int(name[1]))), 1) for name in names]


def filled(*names: str) -> tuple[JobQueue, list[Job]]:
    queue, made = JobQueue(), jobs(*names)
    for job in made:
        queue.put(job)
    return queue, made


def test_first_come_first_served() -> None:
    queue, (a, b, c) = filled("a1", "b1", "c1")
    assert [queue.start(), queue.start(), queue.start(), queue.start()] == [a, b, c, None]
    assert len(queue) == 3


def test_one_turn_of_a_session_at_a_time() -> None:
    queue, (a1, a2, b1) = filled("a1", "a2", "b1")
    assert queue.start() is a1
    assert queue.start() is b1
    assert queue.start() is None
    assert queue.waiting == (a2,)
    queue.finish(a1)
    assert queue.start() is a2


def test_jobs_without_a_session_run_side_by_side() -> None:
    queue, made = JobQueue(), [Job("", (1,), 1) for _ in range(3)]
    for job in (*made, made[0]):  # the same one may be asked for twice
        queue.put(job)
    assert [queue.start() for _ in range(5)] == [*made, made[0], None]
    assert len(queue.running) == 4
    queue.finish(made[1])
    queue.give_back(made[2])
    queue.finish(made[0])
    queue.finish(made[0])
    assert queue.running == () and queue.waiting == (made[2],)


def test_a_job_that_cannot_finish_ends_no_other_one() -> None:
    queue, (a1, a2) = filled("a1", "a2")
    assert queue.start() is a1
    with pytest.raises(KeyError):
        queue.finish(a2)
    assert queue.running == (a1,)


def test_a_job_whose_worker_died_is_next() -> None:
    queue, (a1, b1, a2) = filled("a1", "b1", "a2")
    assert queue.start() is a1
    queue.give_back(a1)
    assert queue.waiting == (a1, b1, a2)
    assert queue.start() is a1


def test_equal_turns_of_one_session_are_different_jobs() -> None:
    queue, (first, second) = filled("a1", "a1")
    assert queue.start() is first
    queue.finish(first)
    assert queue.start() is second


def test_only_a_running_job_can_finish() -> None:
    queue, (a1,) = filled("a1")
    with pytest.raises(KeyError):
        queue.finish(a1)
    assert queue.start() is a1
    queue.finish(a1)
    with pytest.raises(KeyError):
        queue.finish(a1)
    assert len(queue) == 0


def test_a_job_that_waits_can_be_withdrawn_and_no_other() -> None:
    queue, (first, second, b1) = filled("a1", "a1", "b1")
    queue.withdraw(second)
    assert queue.waiting == (first, b1) and queue.waiting[0] is first
    with pytest.raises(KeyError):
        queue.withdraw(second)
    assert queue.start() is first
    with pytest.raises(KeyError):
        queue.withdraw(first)
