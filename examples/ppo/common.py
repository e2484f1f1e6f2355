"""The reward of a response."""

from rlmesh.rl.rewards import Response


def score(text: str, ended: bool, ground_truth: str) -> float:
    """1 for exactly the right answer, ended by the policy itself; else 0."""
    return float(ended and text.replace(" ", "") == ground_truth)


def exact_match(sample: Response, ground_truth: str) -> float:
    return score(sample.text, sample.finish_reason == "stop", ground_truth)
