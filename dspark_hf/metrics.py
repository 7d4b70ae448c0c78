"""What is counted in a run: rounds, τ, acceptance by position, verification lengths and the time of each phase.

τ counts the tokens a round commits, bonus token included (paper, footnote 3). A round that a stop cuts short counts the
tokens it kept; draft tokens after the cut count as not verified. Prefill is no round: its token does not count in τ.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch


PHASES = ("prefill", "draft", "schedule", "verify", "commit")


@dataclass(frozen=True, slots=True)
class RoundRecord:
    r"""
    One row of one round.

    Args:
        row (`int`): Row of the batch.
        verified (`int`): Draft tokens sent to the target, up to the end of the text.
        accepted (`int`): Draft tokens committed.
        committed (`int`): Tokens committed, τ of this round.
        confidence_logits (`torch.FloatTensor` of shape `(K,)`, *optional*): Of the row's K draft tokens, verified or not, before
            calibration; on the drafter's device.
    """

    row: int
    verified: int
    accepted: int
    committed: int
    confidence_logits: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass
class DecodingStatistics:
    r"""
    Counts of one `generate()` call.

    Args:
        block_size (`int`): γ of the drafter.
        records (`list[RoundRecord]`): One entry for each unfinished row of each round.
        target_forwards (`int`): Target forwards after prefill, replays included.
        replays (`int`): Target forwards that ran accepted tokens once more, for the recurrent states of hybrid targets.
        seconds (`dict[str, float]`): Seconds by phase, see `PHASES`.
    """

    block_size: int
    records: list[RoundRecord] = field(default_factory=list)
    target_forwards: int = 0
    replays: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_round(self, records: list[RoundRecord], confidence_logits: torch.Tensor | None) -> None:
        """Add the records of a round, each with its own row of `confidence_logits` `(R, K)`; the device is not waited for."""
        if confidence_logits is not None:
            records = [replace(record, confidence_logits=confidence_logits[record.row]) for record in records]
        self.records += records

    @property
    def rounds(self) -> int:
        """Rounds, each row counted on its own."""
        return len(self.records)

    @property
    def tau(self) -> float:
        """Pooled accepted length: committed tokens over rounds; NaN without rounds."""
        return _ratio(sum(record.committed for record in self.records), self.rounds)

    @property
    def tau_by_row(self) -> dict[int, float]:
        """Accepted length of each row that had a round."""
        rows = sorted({record.row for record in self.records})
        by_row = {row: [record.committed for record in self.records if record.row == row] for row in rows}
        return {row: sum(committed) / len(committed) for row, committed in by_row.items()}

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of all rounds that accepted at least k tokens, for k = 1..γ."""
        return [_ratio(self._accepted(k), self.rounds) for k in self._positions]

    @property
    def conditional_acceptance_by_position(self) -> list[float]:
        """(accepted >= k) / (accepted >= k - 1 and verified >= k), for k = 1..γ; NaN where nothing was verified."""
        return [
            _ratio(self._accepted(k), sum(r.accepted >= k - 1 and r.verified >= k for r in self.records))
            for k in self._positions
        ]

    @property
    def verification_lengths(self) -> list[int]:
        """Number of rounds that verified 0, 1, ..., γ draft tokens."""
        return [sum(record.verified == length for record in self.records) for length in range(self.block_size + 1)]

    @property
    def _positions(self) -> range:
        return range(1, self.block_size + 1)

    def _accepted(self, k: int) -> int:
        return sum(record.accepted >= k for record in self.records)

    def summary(self) -> str:
        """One line for people."""
        lengths = sum(record.verified for record in self.records)
        phases = ", ".join(f"{name} {self.seconds.get(name, 0.0):.2f} s" for name in PHASES)
        return (
            f"accepted length {self.tau:.2f} over {self.rounds} rounds, "
            f"{_ratio(lengths, self.rounds):.1f} draft tokens verified a round; {phases}"
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


class PhaseTimer:
    """Adds up the time between marks by phase, without stopping the device: CUDA events there, the clock elsewhere."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, phase: str) -> None:
        """Give the time since the last mark to `phase`."""
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        totals = dict.fromkeys(PHASES, 0.0)
        for (_, start), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            totals[phase] += start.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - start
        return totals

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
