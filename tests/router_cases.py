"""Cases of the general router that the simulator and the GPU share."""

from dataclasses import dataclass

import numpy as np

from npmoe.ops.route import TopKRule


@dataclass(frozen=True)
class RouterCase:
    """One way to choose; biases are drawn where they are asked for."""

    name: str
    num_experts: int
    k: int
    renormalize: bool
    rule: TopKRule = TopKRule()  # noqa: RUF009
    selection_bias: bool = False
    logits_bias: bool = False

    def arrays(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """(router_logits, selection_bias, logits_bias) whose scores are equal or well apart.

        Logits are whole eighths and biases a few values: scores that differ do so by far more
        than two exponentials may.
        """
        rng = np.random.default_rng(self.num_experts)
        logits = rng.integers(-40, 41, (num_tokens, self.num_experts)) / np.float32(8)
        selection = rng.choice(np.float32([-0.25, 0, 0.5]), self.num_experts)
        added = rng.choice(np.float32([-1, 0, 0.125]), self.num_experts)
        return (
            logits.astype(np.float32),
            selection if self.selection_bias else None,
            added if self.logits_bias else None,
        )


ROUTERS = [
    RouterCase("qwen3", 128, 8, True),
    RouterCase("olmoe", 64, 8, False),
    RouterCase("gpt-oss", 32, 4, True, logits_bias=True),
    RouterCase("one-of-few", 5, 1, False),
    RouterCase("all-of-few", 3, 3, True, selection_bias=True),
    RouterCase("deepseek-v2", 64, 6, False, TopKRule("softmax", 8, 3, scaling=16.0)),
    RouterCase(
        "deepseek-v3",
        *(64, 8, True, TopKRule("sigmoid", 8, 4, "sum_of_two", 2.5)),
        selection_bias=True,
    ),
    RouterCase("glm4", 128, 8, True, TopKRule("sigmoid"), selection_bias=True),
    RouterCase("softmax-bias", 60, 4, False, selection_bias=True, logits_bias=True),
    RouterCase("sum-without-bias", 24, 4, True, TopKRule("softmax", 6, 2, "sum_of_two")),
]
