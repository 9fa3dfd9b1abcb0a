"""How many threads a decode step takes, on a machine whose clock the test holds."""

from __future__ import annotations

import pytest

from isthmus.live.engine.turns import RARELY, SELDOM, StepChoice, Team


class Machine:
    """`wake_s`: what each further thread costs a step; a row takes a second of one thread. Every `disturbed`-th step
    takes ten times as long."""

    def __init__(self, wake_s: float, disturbed: int = 1 << 30) -> None:
        self.wake_s, self.disturbed = wake_s, disturbed
        self.now_s, self.threads, self.num_steps = 0.0, 0, 0

    def set_threads(self, threads: int) -> None:
        assert threads != self.threads, "told only of changes"
        self.threads = threads

    def run(self, team: Team, num_rows: int, steps: int) -> list[int]:
        """The threads of each step."""
        taken = []
        for _ in range(steps):
            with team.step(num_rows):
                self.num_steps += 1
                slow = 10 if self.num_steps % self.disturbed == 0 else 1
                self.now_s += slow * (num_rows / self.threads + self.wake_s * (self.threads - 1))
                taken.append(self.threads)
        return taken


def team_of(machine: Machine, threads: int) -> Team:
    machine.threads = threads
    return Team(threads, machine.set_threads, lambda: machine.now_s)


def test_few_rows_come_to_take_one_thread_and_many_keep_all() -> None:
    machine = Machine(wake_s=1.0)
    team = team_of(machine, 4)
    assert machine.run(team, 1, SELDOM) == [4] * (SELDOM - 1) + [2], "all, until a trial"
    machine.run(team, 1, 40 * SELDOM)
    machine.run(team, 32, 40 * SELDOM)
    few, many = machine.run(team, 1, 100), machine.run(team, 32, 100)
    assert few.count(1) > 90 and many.count(4) > 90


@pytest.mark.parametrize("disturbed", [3, 7, SELDOM])
def test_disturbed_steps_change_nothing(disturbed: int) -> None:
    """Even if each trial is one of them, or most of the steps before it."""
    machine = Machine(wake_s=0.01, disturbed=disturbed)
    team = team_of(machine, 2)
    assert machine.run(team, 8, 5000)[-400:].count(2) > 390


def test_a_machine_that_changes_is_noticed() -> None:
    machine = Machine(wake_s=3.0)
    team = team_of(machine, 2)
    assert machine.run(team, 2, 200)[-SELDOM:].count(1) >= SELDOM - 1
    machine.wake_s = 0.0
    assert machine.run(team, 2, 10 * RARELY)[-SELDOM:].count(2) >= SELDOM - 1


def test_threads_that_bring_nothing_are_left_to_others() -> None:
    """A second thread that halves the work and costs as much to wake."""
    machine = Machine(wake_s=0.5)
    team = team_of(machine, 2)
    assert machine.run(team, 1, 20 * SELDOM)[-SELDOM:].count(1) >= SELDOM - 1
    machine.wake_s = 0.45  # 5 % quicker is not worth it
    assert machine.run(team, 1, 10 * RARELY)[-SELDOM:].count(1) >= SELDOM - 1


def test_trials_become_rare() -> None:
    machine = Machine(wake_s=0.0)
    team = team_of(machine, 2)
    taken = machine.run(team, 8, 10_000)
    assert taken[:200].count(1) >= 5
    assert 1 <= taken[-2 * RARELY :].count(1) <= 3


def trials(choice: StepChoice, steps: int) -> set[int]:
    """The steps that were tried with another number, none of which was better."""
    found = set()
    for step in range(steps):
        number = choice.next()
        if number != choice.number:
            found.add(step)
        choice.took(number, 1.0 + (number != choice.number))
    return found


def test_two_choices_do_not_try_in_the_same_step() -> None:
    one, other = trials(StepChoice(4, 4), 4000), trials(StepChoice(2, 1, SELDOM // 2), 4000)
    assert len(one) > 20 and len(other) > 20 and not one & other


def test_all_threads_for_anything_else() -> None:
    machine = Machine(wake_s=5.0)
    team = team_of(machine, 2)
    while machine.run(team, 1, 1) == [2]:
        pass
    team.all()
    assert machine.threads == 2
    team.all()


def test_what_fails_is_no_trial() -> None:
    machine = Machine(wake_s=5.0)
    team = team_of(machine, 2)
    for _ in range(500):
        with pytest.raises(ZeroDivisionError), team.step(1):
            _ = 1 // 0
    assert machine.threads == 2
