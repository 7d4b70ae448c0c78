"""What a round does: whether to draft, and how much of each row's draft to verify (section 3.2).

The policy chooses from calibrated confidences; a throughput policy also asks what the verifier takes, which the cost
curve knows, and lets the gate skip drafting where past rounds did not pay. All of it was known before the tokens that it
decides about were drawn.
"""

import torch

from dspark_hf.calibration import calibrated_confidence
from dspark_hf.cost_curve import CostCurve, ForwardCosts
from dspark_hf.gating import DraftGate, next_gate
from dspark_hf.host import TargetModel
from dspark_hf.modeling.modeling_dspark import DSparkDraft, DSparkDraftModel
from dspark_hf.scheduling import Candidates, Policy
from dspark_hf.transfer import upload
from dspark_hf.verification_cost import PaddedCost


class Planner:
    r"""
    Plans the rounds of one call.

    Args:
        policy ([`Policy`]): Chooses verification lengths.
        target (`PreTrainedModel`): The target.
        drafter ([`DSparkDraftModel`]): Its drafter.
        rows (`int`): Rows of the batch.
        most (`int`): Most draft tokens of a row in a round.
        greedy (`bool`): Whether the call is greedy, so that what earlier calls learned may be used.
    """

    def __init__(
        self, policy: Policy, target: TargetModel, drafter: DSparkDraftModel, rows: int, most: int, greedy: bool
    ):
        self.policy = policy
        temperatures = drafter.config.confidence_temperatures
        self.temperatures = None if temperatures is None else upload(temperatures, drafter.device)
        self.curve = CostCurve.open(target, drafter) if policy.needs_cost else None
        learns_on = greedy and self.curve is not None
        self.gate = next_gate(drafter, target, rows, most) if learns_on else DraftGate()
        self._cost: tuple[ForwardCosts, int, PaddedCost] | None = None

    @property
    def drafts(self) -> bool:
        """Whether the next round drafts."""
        return self.gate.is_open

    def lengths(self, draft: DSparkDraft, caps: list[int], finished: list[bool], context: int) -> torch.Tensor:
        r"""
        Choose how much to verify.

        Args:
            draft ([`DSparkDraft`]): K draft tokens for each of R rows, K >= 1.
            caps (`list[int]`): Largest length of each row.
            finished (`list[bool]`): Rows that have ended.
            context (`int`): Slots in use.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Lengths in `[0, caps]`.
        """
        confidence = None
        if self.policy.needs_confidence and draft.confidence_logits is not None:
            confidence = calibrated_confidence(draft.confidence_logits, self.temperatures)
        if self.curve is None:
            device, cost = torch.device("cpu"), None
        else:
            device = draft.tokens.device
            cost = self._cost_on(device, self.curve.costs(len(caps), context), draft.tokens.shape[1])
        active = upload([not ended for ended in finished], device)
        return self.policy.verification_lengths(Candidates(confidence, upload(caps, device), active, cost))

    def observe(self, progress: int, rows: int, width: int, drafted: int, context: int) -> None:
        r"""
        Learn from a finished round.

        Args:
            progress (`int`): Plain rounds that would have brought the batch as far as this one did.
            rows (`int`): Rows of the batch.
            width (`int`): Longest verification length.
            drafted (`int`): Draft tokens of a row, 0 for none.
            context (`int`): Slots in use.
        """
        if self.curve is None:
            return
        if drafted > 0:
            costs = self.curve.costs(rows, context)
            seconds = costs.draft_seconds[drafted - 1] + costs.target_seconds[width]
            self.gate.observe_draft(progress, seconds / costs.target_seconds[0])
        else:
            self.gate.observe_plain()

    def _cost_on(self, device: torch.device, costs: ForwardCosts, drafted: int) -> PaddedCost:
        """Seconds of a whole step, drafting included, by verification length; on a device, brought there once for each entry
        of the curve."""
        if self._cost is None or self._cost[0] is not costs or self._cost[1] != drafted:
            seconds = torch.tensor(costs.target_seconds, dtype=torch.double) + costs.draft_seconds[drafted - 1]
            self._cost = (costs, drafted, PaddedCost(seconds.to(device)))
        return self._cost[2]
