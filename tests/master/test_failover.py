"""What is decided about failures, by any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh.job.restarts import SCOPES
from rlmesh.job.status import FailureInfo, RestartRecord
from rlmesh.master.decisions.failover import Exhausted, FailoverCoordinator, Restart, delay_before
from rlmesh.master.jobspec import RestartRule

SIZES = {"TRAINER": 1, "ACTOR": 2, "ROLLOUT": 3}


def failure(role: str = "ROLLOUT", rank: int = 1, message: str = "it was killed") -> FailureInfo:
    return FailureInfo(message, role, rank, 100.0)


def coordinator(rule: RestartRule) -> FailoverCoordinator:
    return FailoverCoordinator(dict.fromkeys(SIZES, rule), SIZES)


@pytest.mark.parametrize(
    ("scope", "unit", "members"),
    [
        ("member", "ROLLOUT:1", {("ROLLOUT", 1)}),
        ("role", "ROLLOUT", {("ROLLOUT", 0), ("ROLLOUT", 1), ("ROLLOUT", 2)}),
        ("job", "job", {(role, rank) for role, size in SIZES.items() for rank in range(size)}),
    ],
)
def test_the_scope_decides_which_members_restart(scope: str, unit: str, members: set[tuple[str, int]]) -> None:
    decision = coordinator(RestartRule(scope)).decide(failure(), [], 100.0)  # type: ignore[arg-type]
    assert isinstance(decision, Restart)
    assert (decision.record.unit, set(decision.members), decision.number) == (unit, members, 1)
    assert decision.record.delay_s == 0


def test_never_is_never() -> None:
    assert coordinator(RestartRule("never")).decide(failure(), [], 100.0) is None
    assert not coordinator(RestartRule("never", on_error=True)).restarts_errors("ACTOR")


def test_the_first_error_is_told_when_the_budget_is_spent() -> None:
    rule = RestartRule("member", max_restarts=2, window_s=100)
    decide = coordinator(rule).decide
    history: list[RestartRecord] = []
    for number in range(2):
        decision = decide(failure(message=f"cause {number}"), history, 100.0 + number)
        assert isinstance(decision, Restart)
        history.append(decision.record)
    assert isinstance(decide(failure(rank=2), history, 103.0), Restart), "another member has its own budget"
    over = decide(failure(message="cause 2"), history, 103.0)
    assert isinstance(over, Exhausted)
    text = over.failure.message
    assert text.startswith("ROLLOUT:1 was restarted 2 times within 100 s")
    assert "Its first failure, 3 s ago: cause 0" in text and "The last one: cause 2" in text
    assert over.failure.kind == "RestartBudgetExhausted"
    assert isinstance(decide(failure(), history, 300.0), Restart), "the window is over"


def test_the_budget_of_the_job_counts_all_roles_that_have_it() -> None:
    rule = RestartRule("member", max_restarts=2, window_s=10, of_job=2)
    rules = {**dict.fromkeys(SIZES, rule), "TRAINER": RestartRule("member", max_restarts=1)}
    decide = FailoverCoordinator(rules, SIZES).decide
    history: list[RestartRecord] = []
    for number, (role, rank) in enumerate((("ACTOR", 0), ("TRAINER", 0), ("ROLLOUT", 1))):
        decision = decide(failure(role, rank, f"cause {number}"), history, 100.0 * number)
        assert isinstance(decision, Restart)
        history.append(decision.record)
    over = decide(failure("ACTOR", 1, "cause 3"), history, 1000.0)
    assert isinstance(over, Exhausted), "no window: the others were long ago"
    text = over.failure.message
    assert text.startswith("the job restarted members 2 times, as often as --max-restarts allows, and ACTOR:1 failed")
    assert "The first failure, 1000 s ago: cause 0" in text and "The last one: cause 3" in text
    assert isinstance(decide(failure("TRAINER", 0), history, 1000.0), Restart), "its own number holds for it"


def test_delays_double_up_to_the_maximum() -> None:
    rule = RestartRule("member", delay_s=1.0, max_delay_s=5.0)
    assert [delay_before(earlier, rule) for earlier in range(6)] == [0, 1, 2, 4, 5, 5]


RULES = st.builds(
    RestartRule,
    scope=st.sampled_from(SCOPES),
    max_restarts=st.integers(0, 4),
    window_s=st.floats(1, 50),
    delay_s=st.floats(0, 10),
    max_delay_s=st.floats(0, 20),
)
FAILURES = st.lists(
    st.tuples(
        st.sampled_from([(role, rank) for role, size in SIZES.items() for rank in range(size)]), st.floats(0, 20)
    ),
    max_size=30,
)


@given(st.fixed_dictionaries(dict.fromkeys(SIZES, RULES)), FAILURES)
def test_no_history_restarts_more_than_its_budget(
    rules: dict[str, RestartRule], failures: list[tuple[tuple[str, int], float]]
) -> None:
    decider = FailoverCoordinator(rules, SIZES)
    history: list[RestartRecord] = []
    now = 0.0
    for (role, rank), after_s in failures:
        now += after_s
        rule = rules[role]
        decision = decider.decide(failure(role, rank), history, now)
        assert decision == decider.decide(failure(role, rank), history, now), "the same facts, the same decision"
        if rule.scope == "never":
            assert decision is None
        elif isinstance(decision, Restart):
            assert (role, rank) in decision.members
            assert 0 <= decision.record.delay_s <= max(rule.max_delay_s, 0)
            history.append(decision.record)
            recent = [r for r in history if r.unit == decision.record.unit and r.at > now - rule.window_s]
            assert len(recent) <= rule.max_restarts and decision.number == len(recent)
        else:
            assert isinstance(decision, Exhausted)
            assert decision.failure.message.count("first failure") == 1
