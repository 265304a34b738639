"""Counts by reason."""

from __future__ import annotations

from mclclip.data.findings import Findings


def test_what_is_left_when_reasons_are_taken_out() -> None:
    findings = Findings()
    findings.add("of a later version", "a")
    findings.add("no_field:title", "b")
    findings.add("no_image", "c", "d")
    assert [*findings.without(["no_image"]).to_json()] == ["no_field:title", "of a later version"]
    assert findings.without(["no_field"]).total() == 3
