"""No row of the index of violations is left out, and none is named that it does not have."""

from __future__ import annotations

from collections import Counter

from tests.unit.moqt import (
    test_violations_data,
    test_violations_requests,
    test_violations_session,
)
from tests.unit.moqt.violations import ROWS

CASES = [
    *test_violations_session.CASES,
    *test_violations_requests.CASES,
    *test_violations_data.CASES,
]


def test_every_row_has_a_case() -> None:
    covered = {case.row for case in CASES} | test_violations_requests.ROWS_APART
    assert covered == set(ROWS)
    assert len(ROWS) == 42


def test_no_case_is_there_twice() -> None:
    names = Counter((case.row, case.label) for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_row_says_what_how_strictly_and_what_then() -> None:
    for row, (what, level, outcome) in ROWS.items():
        assert what and outcome, row
        assert level in {"MUST", "SHOULD", "MAY", "-"}, row
