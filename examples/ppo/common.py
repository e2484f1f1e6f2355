"""The reward of a response."""

from rlmesh.rl.rewards import Response


def exact_match(sample: Response, ground_truth: str) -> float:
    """1 for exactly the right answer, ended by the policy itself; else 0."""
    return float(sample.finish_reason == "stop" and sample.text.replace(" ", "") == ground_truth)
