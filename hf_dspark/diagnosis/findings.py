"""`Finding` and `Diagnosis`: what the doctor saw, what it means and what to do."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"
# The verdict is that of the first topic with a problem.
VERDICTS = {
    "pairing": "does not fit: these two cannot work together",
    "exactness": "not exact: the text differs from the target's own",
    "sampling": "not exact: sampled text does not follow the target's distribution",
    "reading": "read the wrong way: another reading of the same draft keeps clearly more",
    "acceptance": "low acceptance: the text is right, but drafting does not pay",
}
HEALTHY = "healthy"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what was looked at.
        level: `"ok"`, `"note"` (worth knowing) or `"problem"`.
        seen: what was seen, with the numbers.
        fix: what to do about it, empty where there is nothing to do.
    """

    topic: str
    level: str
    seen: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        findings: in the order they were made.
        measured: numbers behind them, as plain Python values.
    """

    findings: Sequence[Finding]
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == PROBLEM]

    @property
    def verdict(self) -> str:
        """One sentence: "healthy", or the gravest problem."""
        topics = {finding.topic for finding in self.problems}
        return next((text for topic, text in VERDICTS.items() if topic in topics), HEALTHY)

    @property
    def healthy(self) -> bool:
        return not self.problems

    @property
    def next_steps(self) -> list[str]:
        """What to do: fixes of problems, the gravest first, then those of notes.

        A reading that does better explains low acceptance, and until it is mended other comparisons mean little.
        """
        problems = sorted(self.problems, key=lambda finding: list(VERDICTS).index(finding.topic))
        steps = [*problems, *(finding for finding in self.findings if finding.level == NOTE)]
        if any(finding.topic == "reading" for finding in problems):
            steps = [finding for finding in steps if finding.topic not in ("acceptance", "target", "template")]
        return list(dict.fromkeys(finding.fix for finding in steps if finding.fix))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, for JSON."""
        return {
            "verdict": self.verdict,
            "healthy": self.healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "next_steps": self.next_steps,
            **self.measured,
        }
