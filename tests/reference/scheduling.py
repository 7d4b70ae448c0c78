"""Algorithm 1 and the best choice of verification lengths, written as loops over lists (DSpark, section 3.2.2)."""

import itertools


def forward_seconds(lengths: list[int], seconds: list[float], padded: bool) -> float:
    """Seconds of a forward; entry i of `seconds` is one of width i + 1 when padded, of i + 1 tokens when flattened."""
    return seconds[max(lengths)] if padded else seconds[sum(1 + length for length in lengths) - 1]


def throughput(lengths, survival, seconds, padded, active) -> float:
    gained = sum(sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return (active + gained) / forward_seconds(lengths, seconds, padded)


def algorithm_1(survival, caps, seconds, padded, active) -> list[int]:
    """Admit as long as Θ rises: candidates by survival when flattened, one position of all rows when padded."""
    rows = range(len(survival))
    lengths = [0] * len(survival)
    best = throughput(lengths, survival, seconds, padded, active)
    if padded:
        steps = [[r for r in rows if caps[r] >= k] for k in range(1, max(caps, default=0) + 1)]
    else:
        candidates = [(-survival[r][j], j, r) for r in rows for j in range(caps[r]) if survival[r][j] > 0]
        steps = [[r] for _, _, r in sorted(candidates)]
    for step in steps:
        tried = [length + (r in step) for r, length in enumerate(lengths)]
        found = throughput(tried, survival, seconds, padded, active)
        if not found > best:
            break
        lengths, best = tried, found
    return lengths


def best_throughput(survival, caps, seconds, padded, active) -> float:
    """Largest Θ of all choices of lengths."""
    choices = itertools.product(*(range(cap + 1) for cap in caps))
    return max(throughput(list(lengths), survival, seconds, padded, active) for lengths in choices)
