"""The passes of a round, timed on the live pair: drafts of every length and target forwards of every width.

They are the loop's own pieces, the `Verifier` and the `Drafting`, on random tokens behind a cache of noise, which takes as
long to read as a text and needs no prefill. Timing changes neither the models nor any global random state.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm

from dspark_hf.caches import SlotCache
from dspark_hf.drafting import Context, Drafting
from dspark_hf.host import TargetModel
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.narrow import narrow_linears
from dspark_hf.sampling import Sampler
from dspark_hf.transfer import upload
from dspark_hf.verification import Verifier


REPEATS = 9
TIME_LIMIT_S = 20.0
SILENT_S = 3.0  # A measurement that takes longer shows a progress bar.

Clock = Callable[[], float]


def time_passes(
    target: TargetModel, drafter: DSparkDraftModel, rows: int, context: int, clock: Clock = time.perf_counter
) -> list[list[float]]:
    r"""
    Time every pass: once to warm up, then until there are `REPEATS` more or the time limit is over, in a new order each.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`DSparkDraftModel`]): Its drafter.
        rows (`int`): Rows of the batch.
        context (`int`): Slots in use before the round.
        clock (`Clock`, *optional*): Gives the time in seconds.

    Returns:
        `list[list[float]]`: Seconds, the warm-up first, of drafts of 1, ..., block_size tokens, then of target forwards over
        1, ..., block_size + 1 tokens of every row.
    """
    with _quietly(target), _passes(target, drafter, rows, context) as passes:
        return _time(passes, drafter.device, clock, f"cost curve, {rows} rows, context {context}")


@contextmanager
def _quietly(target: TargetModel) -> Iterator[None]:
    """Run the target as the loop does; dropout of one in training mode takes nothing from the global random state."""
    devices = {parameter.device for parameter in target.parameters() if parameter.device.type == "cuda"}
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        target._optimize_model_for_decode(),
    ):
        yield


@contextmanager
def _passes(
    target: TargetModel, drafter: DSparkDraftModel, rows: int, context: int
) -> Iterator[list[Callable[[], object]]]:
    """The passes of a round behind `context` tokens: drafts of 1, 2, ..., block_size tokens, then target forwards of 1, 2, ...,
    block_size + 1 tokens."""
    config, device = drafter.config, drafter.device
    widest = config.block_size + 1
    context = max(context, widest)
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(config.vocab_size, (rows, widest), generator=generator, device=device)
    slots = (context + torch.arange(widest, device=device)).expand(rows, -1)
    prompt_mask = torch.ones(rows, context, dtype=torch.bool, device=device)
    # Positions start at 0 whatever the context is: tables of learned ones and dynamic frequencies are left in peace.
    kwargs = {"position_ids": torch.full((rows, 1), -1, device=device), "use_cache": True}
    verifier = Verifier(
        target, SlotCache(target.config.get_text_config(decoder=True).num_hidden_layers), prompt_mask, kwargs
    )
    drafting = Drafting(drafter, target, prompt_mask, 0)
    width_of_taps = len(config.target_layer_ids) * config.target_hidden_size
    taps = torch.randn(rows, widest, width_of_taps, generator=generator, device=device, dtype=drafter.dtype)
    # The most that a round hands over; only the committed part is kept, but all of it is computed.
    last_round = Context(taps, slots - widest, upload([widest] * rows, device))

    def draft(num_tokens: int) -> Callable[[], object]:
        used = context + config.num_block_inputs

        def run() -> None:
            drafting.observe(last_round)
            drafting.draft(tokens[:, 0], slots[:, 0], used, num_tokens, _choose)

        return run

    def verify(width: int) -> Callable[[], object]:
        return lambda: verifier(tokens[:, :width], slots[:, :width], context + width, upload([width] * rows, device))

    passes = [draft(number) for number in range(1, widest)] + [verify(width) for width in range(1, widest + 1)]
    caches = (verifier.cache, drafting.cache)
    try:
        for first in (passes[0], passes[-1]):
            first()  # gives the caches their buffers
        for layer in (layer for cache in caches for layer in cache.layers):
            for states in (layer.keys, layer.values):
                states.normal_(generator=torch.Generator(states.device).manual_seed(0))
        with narrow_linears(target, drafter, drafting.lm_head):
            yield passes
    finally:
        for cache in caches:
            cache.layers.clear()  # cache and layers point at each other: do not leave their memory to the garbage collector


def _choose(_index: int, logits: torch.Tensor, _drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = Sampler(do_sample=False)
    probs = sampler.distribution(logits)
    return sampler.draw(probs), probs


def _time(passes: list[Callable[[], object]], device: torch.device, clock: Clock, what: str) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in passes]
    order = list(range(len(passes)))
    shuffle = random.Random(0).shuffle
    begin = clock()
    with tqdm(total=(1 + REPEATS) * len(passes), desc=what, unit="pass", delay=SILENT_S, leave=False) as bar:
        for repeat in range(1 + REPEATS):
            shuffle(order)
            for number in order:
                if repeat > 0 and clock() - begin >= TIME_LIMIT_S:
                    return times
                _synchronize(device)
                start = clock()
                passes[number]()
                _synchronize(device)
                times[number].append(clock() - start)
                bar.update()
    return times


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
