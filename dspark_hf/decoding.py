"""The decoding loop: draft, schedule, verify, accept, commit. One loop for every batch size, greedy and sampling.

After prefill the target has seen every token but the last of each row, its anchor. A round drafts a block after each
anchor, chooses how much of it to verify, runs the target once over the anchors and those drafts, and commits what
the acceptance rule lets through and a token of the target's own, the next anchor. Whatever the drafter proposes, the
text is the target's: only the number of rounds depends on the drafter.
"""

from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from dspark_hf.caches import SlotCache, check_host_cache
from dspark_hf.calibration import warn_of_other_setting
from dspark_hf.committing import BlockCommitter, Committer, StepCommitter
from dspark_hf.drafting import Context, Drafting, check_lending, share_with_target
from dspark_hf.host import TargetModel, cache_argument, skips_prompt, was_passed_by_user
from dspark_hf.judging import DrafterJudge
from dspark_hf.metrics import DecodingStatistics, PhaseTimer, RoundRecord
from dspark_hf.modeling.modeling_dspark import DSparkDraft, DSparkDraftModel
from dspark_hf.narrow import narrow_linears
from dspark_hf.options import check_prompt, read_options
from dspark_hf.outputs import DSparkGenerateOutput, OutputRecorder
from dspark_hf.planning import Planner
from dspark_hf.processors import Processors, check_processors
from dspark_hf.recurrent import check_ranks
from dspark_hf.sampling import Sampler
from dspark_hf.sequences import Sequences, StopRules
from dspark_hf.taps import TapRecorder, tapped_layers
from dspark_hf.transfer import upload
from dspark_hf.verification import (
    Verification,
    Verifier,
    check_attentions,
    check_positions,
    check_rotary_length,
    learned_positions,
)


class Decoding:
    r"""
    One `generate()` call with a DSpark drafter.

    Args:
        target (`PreTrainedModel`): The model whose output is reproduced.
        drafter ([`DSparkDraftModel`]): The drafter.
        input_ids (`torch.LongTensor` of shape `(R, P)`): The prompt, left-padded.
        logits_processor (`LogitsProcessorList`): As the host prepared them, as all that follows.
        stopping_criteria (`StoppingCriteriaList`): When rows end.
        generation_config (`GenerationConfig`): The call's options.
        model_kwargs (`dict[str, Any]`): Arguments of the target's forward, with attention mask, positions and cache.
        synced_gpus (`bool`): Go on until the other ranks are done too.
        streamer (`BaseStreamer`, *optional*): Gets every token.

    Raises:
        ValueError: Before the first forward, for bad input.
        NotImplementedError: Before the first forward, for what cannot work.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DSparkDraftModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
    ):
        self.target, self.drafter = target, drafter
        self.generation_config, self.model_kwargs = generation_config, model_kwargs
        self.synced_gpus, self.streamer = synced_gpus, streamer
        self.position_limit = learned_positions(target)
        check_prompt(input_ids, model_kwargs.get("attention_mask"), drafter)
        prompt_positions = int(model_kwargs["position_ids"].max()) + 1
        check_positions(prompt_positions, self.position_limit)
        check_processors(logits_processor)
        check_host_cache(model_kwargs.get(cache_argument()))
        check_ranks(target, synced_gpus)
        self.host_cache: Any = model_kwargs[cache_argument()]
        self.options = read_options(drafter, generation_config)
        check_lending(drafter, target)
        share_with_target(drafter, target)
        self.judge = DrafterJudge(drafter, target)
        self.planner = Planner(
            self.options.policy,
            target,
            drafter,
            rows=len(input_ids),
            most=self.options.max_draft_tokens,
            greedy=not generation_config.do_sample,
        )
        if self.options.policy.needs_confidence:
            fitted = drafter.config.confidence_calibration
            warn_of_other_setting(fitted, bool(generation_config.do_sample), generation_config.temperature)
        self.sampler = Sampler(bool(generation_config.do_sample))
        self.processors = Processors(logits_processor)
        self.draft_processors = Processors(logits_processor, only_stateless=True)
        # Where processors mask every token of a reduced vocabulary, the draft ends: no distribution, so NaN.
        self.vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self.draft_may_end = drafter.config.draft_vocab_size < self.vocab_size and len(self.draft_processors) > 0
        stop = StopRules(stopping_criteria, input_ids.device)
        self.sequences = Sequences(input_ids, stop, generation_config._pad_token_tensor)
        check_rotary_length(target, prompt_positions + self.sequences.tokens_left(0))
        self.outputs = OutputRecorder(generation_config)
        if self.outputs.attentions is not None:
            check_attentions(target, self.host_cache)
        self.statistics = DecodingStatistics(drafter.config.block_size)

    @torch.no_grad()
    def run(self) -> DSparkGenerateOutput | torch.Tensor:
        """Generate.

        Returns:
            `torch.LongTensor` of shape `(R, L)`, or [`DSparkGenerateOutput`] with `return_dict_in_generate=True`.

        Raises:
            RuntimeError: If processed scores give no distribution, or the target bypasses the hooks on its layers.
        """
        self.timer = PhaseTimer(self.sequences.tokens.device)
        layer_ids = tapped_layers(self.drafter.config, self.target)
        with TapRecorder(self.target, layer_ids, self.drafter.device, self.drafter.dtype) as self.taps:
            self._prefill()
            models = (self.target, self.drafter, self.drafting.lm_head)
            with self.target._optimize_model_for_decode(), narrow_linears(*models):
                while self._goes_on():
                    if self.sequences.all_finished:
                        self._keep_other_ranks_company()
                    else:
                        self._round()
                self._return_cache()
        if self.streamer is not None:
            self.streamer.end()
        return self._result()

    def _prefill(self) -> None:
        """Run the prompt as the host does, take over its cache and commit the first token of every row."""
        mask = self.model_kwargs.get("attention_mask")
        if skips_prompt(self.target):  # the drafter reads taps of the whole prompt
            self.model_kwargs["logits_to_keep"] = torch.tensor([-1], device=self.sequences.tokens.device)
        outputs = self.target._prefill(self.sequences.tokens, self.generation_config, self.model_kwargs)
        self.host_cache = outputs[cache_argument()]
        taps = self.taps.take()
        columns = int(self.host_cache.get_seq_length())
        rows, device = len(self.sequences), self.sequences.tokens.device
        prompt_mask = torch.ones(rows, columns, dtype=torch.bool, device=device) if mask is None else mask.bool()
        cache = SlotCache(len(self.host_cache.layers))
        cache.read_host(self.host_cache, columns)
        if not self._cache_is_kept():
            for layer in self.host_cache.layers:
                layer.keys = layer.values = None  # nobody will see it again: hold the prompt once
        self.prompt_columns = columns
        self.verifier = Verifier(self.target, cache, prompt_mask, self.model_kwargs)
        first = columns - taps.shape[1]
        self.drafting = Drafting(self.drafter, self.target, prompt_mask, first, self.judge)
        slots = torch.arange(first, columns, device=device).expand(rows, -1)
        self.drafting.observe(Context(taps, slots, torch.full((rows,), taps.shape[1], device=device)))
        self.commit = self._committer()
        logits = outputs.logits[:, -1:].to(device=device, dtype=torch.float32)
        self.timer.mark("prefill")
        self.commit(self._no_draft(), [0] * rows, Verification(logits, outputs))
        self.timer.mark("commit")

    def _round(self) -> None:
        context = max(self._anchor_slots()) + 1
        caps = self._caps() if self.planner.drafts else [0] * len(self.sequences)
        anchors = self.sequences.last_tokens()
        slots = upload(self._anchor_slots(), anchors.device)
        draft = self._draft(anchors, slots, max(caps))
        self.timer.mark("draft")
        lengths = self._schedule(draft, caps, context)
        self.timer.mark("schedule")
        width, confidence_logits = max(lengths), draft.confidence_logits
        draft = DSparkDraft(tokens=draft.tokens[:, :width], probs=draft.probs[:, :width])
        verification, taps = self._verify(anchors, slots, draft, lengths)
        self.timer.mark("verify")
        before, progress = list(self.sequences.lengths), self.sequences.progress
        records = self.commit(draft, lengths, verification)
        counts = [now - then for now, then in zip(self.sequences.lengths, before, strict=True)]
        self._observe(taps, slots, counts)
        self.statistics.add_round(records, confidence_logits)
        self.planner.observe(self.sequences.progress - progress, len(self.sequences), width, max(caps), context)
        self._judge_drafter(records, before)
        self.timer.mark("commit")
        self._keep(counts)

    def _keep(self, counts: list[int]) -> None:
        """Let the target's recurrent states, if it has any, follow the text, unless nobody will read them again."""
        if self.verifier.recurrent is None or (self.sequences.all_finished and not self._cache_is_kept()):
            return
        replays = self.verifier.keep(counts)
        self.statistics.target_forwards += replays
        self.statistics.replays += replays
        self.timer.mark("verify")

    def _keep_other_ranks_company(self) -> None:
        """Under `synced_gpus` every rank runs a target forward a round until all are done."""
        anchors = self.sequences.last_tokens()
        slots = upload(self._anchor_slots(), anchors.device)
        self._verify(anchors, slots, self._no_draft(), [0] * len(anchors))

    def _draft(self, anchors: torch.Tensor, slots: torch.Tensor, num_tokens: int) -> DSparkDraft:
        if num_tokens == 0:
            return self._no_draft()
        used = max(self._anchor_slots()) + self.drafter.config.num_block_inputs
        draft = self.drafting.draft(anchors, slots, used, num_tokens, self._choose)
        if isinstance(self.commit, StepCommitter) and self.sequences.stop.pads_finished_rows:
            finished = upload(self.sequences.finished, anchors.device)
            draft.tokens = draft.tokens.masked_fill(finished[:, None], self.sequences.pad_token_id)
        return draft

    def _choose(self, index: int, logits: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw draft token `index` + 1 of every row, through the processors that the target's scores go through."""
        if self.draft_processors.read_history:
            self.sequences.write_ahead(drafted)
        lengths = [length + index for length in self.sequences.lengths]
        scores = self.draft_processors(logits, self.sequences.tokens, list(self._rows), lengths)
        probs = self.sampler.distribution(scores)
        if self.draft_may_end:
            probs = torch.where(scores.isneginf().all(dim=-1, keepdim=True), torch.nan, probs)
        return self.sampler.draw(probs), probs

    def _schedule(self, draft: DSparkDraft, caps: list[int], context: int) -> list[int]:
        """Verification lengths, from what was known before the tokens they speak of were drawn."""
        if draft.tokens.shape[1] == 0:
            return caps
        lengths = self.planner.lengths(draft, caps, self.sequences.finished, context)
        if self.draft_may_end:
            possible = draft.probs.sum(dim=-1).isfinite().cumprod(dim=1).sum(dim=1)
            lengths = torch.minimum(lengths.to(possible.device), possible)
        return lengths.tolist()  # waits for the device when a policy looked at the draft

    def _verify(
        self, anchors: torch.Tensor, slots: torch.Tensor, draft: DSparkDraft, lengths: list[int]
    ) -> tuple[Verification, torch.Tensor]:
        """Run the target; return its logits and the taps of its input tokens."""
        tokens = torch.cat([anchors[:, None], draft.tokens], dim=1)
        columns = slots[:, None] + torch.arange(tokens.shape[1], device=slots.device)
        if isinstance(self.commit, StepCommitter):  # rows that ended early go on as padding beside the others
            done = self.sequences.finished
            lengths = [max(lengths) if ended else own for ended, own in zip(done, lengths, strict=True)]
        widths = upload(lengths, slots.device) + 1
        self.statistics.target_forwards += 1
        self.taps.clear()  # a processor or criterion may have run the target itself
        verification = self.verifier(tokens, columns, max(self._anchor_slots()) + tokens.shape[1], widths)
        return verification, self.taps.take()

    def _observe(self, taps: torch.Tensor, slots: torch.Tensor, counts: list[int]) -> None:
        """Hand the taps of the anchors and the accepted tokens to the drafter."""
        longest = max(counts)
        columns = slots[:, None] + torch.arange(longest, device=slots.device)
        self.drafting.observe(Context(taps[:, :longest], columns, upload(counts, slots.device)))

    @property
    def _rows(self) -> range:
        return range(len(self.sequences))

    def _anchor_slots(self) -> list[int]:
        return [self.prompt_columns + generated - 1 for generated in self.sequences.generated]

    def _caps(self) -> list[int]:
        """Most draft tokens to verify in each row: within the text's limit and a learned table of positions."""
        caps = [min(self.options.max_draft_tokens, self.sequences.tokens_left(row) - 1) for row in self._rows]
        if self.position_limit is not None:  # slots are not smaller than positions, unless the caller shifts these
            caps = [
                min(cap, self.position_limit - 1 - slot) for cap, slot in zip(caps, self._anchor_slots(), strict=True)
            ]
        return [max(cap, 0) for cap in caps]

    def _no_draft(self) -> DSparkDraft:
        rows, device = len(self.sequences), self.sequences.tokens.device
        return DSparkDraft(
            tokens=torch.zeros(rows, 0, dtype=torch.long, device=device),
            probs=torch.zeros(rows, 0, self.vocab_size, device=device),
        )

    def _committer(self) -> Committer:
        """All at once where nothing of the user's could see a difference, else token by token."""
        alone = len(self.sequences) == 1
        together = self.sequences.stop.treats_rows_alone and self.processors.all_stateless and not self.outputs.wanted
        if together and (alone or self.streamer is None):
            return BlockCommitter(self.sequences, self.processors, self.sampler, self.streamer)
        return StepCommitter(
            self.sequences, self.processors, self.sampler, self.outputs, self.prompt_columns, self.streamer
        )

    def _goes_on(self) -> bool:
        return self.target._has_unfinished_sequences(
            self.sequences.all_finished, self.synced_gpus, device=self.sequences.tokens.device
        )

    def _judge_drafter(self, records: list[RoundRecord], before: list[int]) -> None:
        """Show a round's outcome to the judge: reading the tokens waits for the device, in the first rounds alone."""
        next_tokens: list[int | None] = [None] * len(self.sequences)
        if self.judge.has_looked:
            columns = upload(before, self.sequences.tokens.device)[:, None]
            first = self.sequences.tokens.gather(1, columns.clamp(max=self.sequences.tokens.shape[1] - 1))[
                :, 0
            ].tolist()
            for record in records:
                next_tokens[record.row] = first[record.row] if record.committed else None
        self.judge.observe([record.accepted > 0 for record in records if record.verified > 0], next_tokens)

    def _return_cache(self) -> None:
        """Bring the host's cache up to date, in its own layout, if anybody will see it again."""
        if not self._cache_is_kept():
            return
        longest = max(self.sequences.generated)
        behind = [longest - generated for generated in self.sequences.generated]
        if any(behind) or self.synced_gpus:  # ranks must run the same forwards
            self._run_padding([max(1, columns) for columns in behind])
            self.verifier.keep(behind)
        self.verifier.cache.write_host(self.host_cache, self.prompt_columns + longest - 1)

    def _cache_is_kept(self) -> bool:
        return bool(self.generation_config.return_dict_in_generate) or was_passed_by_user(self.host_cache)

    def _run_padding(self, widths: list[int]) -> None:
        """Rows that ended early go on as padding in plain generation, so their cache holds it: run it once."""
        width = max(widths)
        slots = upload(self._anchor_slots(), self.sequences.tokens.device)
        anchors = self.sequences.last_tokens()
        pads = anchors.new_full((len(anchors), width), self.sequences.pad_token_id)
        tokens = torch.cat([anchors[:, None], pads[:, 1:]], dim=1)
        columns = slots[:, None] + torch.arange(width, device=slots.device)
        used = max(self._anchor_slots()) + width
        self.verifier(tokens, columns, used, upload(widths, slots.device))

    def _result(self) -> DSparkGenerateOutput | torch.Tensor:
        sequences = self.sequences.result()
        if not self.generation_config.return_dict_in_generate:
            return sequences
        statistics = replace(self.statistics, seconds=self.timer.seconds())
        return DSparkGenerateOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=self.outputs.scores,
            logits=self.outputs.logits,
            attentions=self.outputs.attentions,
            hidden_states=self.outputs.hidden_states,
            statistics=statistics,
            **{cache_argument(): self.host_cache},
        )
