"""Anchors and packed blocks: which are drawn, what they are trained on, and that packing changes no number.

Tolerance: the same float32 operations in another order; hidden states of order 1 agree to 1e-6, while a wrong mask or
position moves them by more than 0.01.
"""

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from reference.chi_square import chi_square
from reference.losses import anchor_candidates, supervised_length

from dspark_hf.training.anchors import (
    Anchors,
    block_hidden_states,
    pack_blocks,
    packed_attention_mask,
    sample_anchors,
)


TOLERANCE = 1e-5
BLOCK = 4
WINDOW = 5
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
VARIANTS = {
    "full attention": {},
    "causal block": {"causal_layer_types": ["full_attention", "sliding_attention"]},
    "sliding and full": SLIDING,
    "sliding and full, causal block": SLIDING | {"causal_layer_types": ["full_attention", "sliding_attention"]},
    "slot 1 predicts first": {"first_prediction_slot": 1},
    "slot 1 predicts first, sliding": SLIDING | {"first_prediction_slot": 1},
    "block of 1": {"block_size": 1},
}
LAYOUTS = {
    "no padding": [[1] * 20, [1] * 20],
    "right padding": [[1] * 20, [1] * 11 + [0] * 9],
    "left padding": [[0] * 7 + [1] * 13, [1] * 20],
    "several sequences in a row": [[1] * 9 + [2] * 11, [3] * 6 + [0] * 2 + [1] * 5 + [2] * 7],
}


@pytest.fixture(scope="module")
def target():
    return make_target().requires_grad_(False)


def random_layout(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss mask and sequence ids of 3 rows of 30 columns, with prompts, holes, padding and several sequences."""
    loss_mask = (torch.rand(3, 30, generator=generator) < 0.75).long()
    rows = []
    for _ in range(3):
        row: list[int] = []
        while len(row) < 30 - 6:
            length = int(torch.randint(BLOCK + 1, 16, (), generator=generator))
            padding = int(torch.randint(0, 3, (), generator=generator))
            row += [max(row, default=0) + 1] * length + [0] * padding
        rows.append((row + [0] * 30)[:30])
    rows = [[number if row.count(number) > BLOCK else 0 for number in row] for row in rows]  # the cut may leave a stub
    return loss_mask, torch.tensor(rows)


def first_column(sequence_ids: torch.Tensor, row: int, column: int) -> int:
    return sequence_ids[row].tolist().index(int(sequence_ids[row, column]))


@pytest.mark.parametrize("seed", range(20))
def test_anchors_are_distinct_candidates_and_dummies_fill_the_rest(seed):
    generator = torch.Generator().manual_seed(seed)
    loss_mask, sequence_ids = random_layout(generator)
    count = 1 + 3 * (seed % 12)  # up to 34, more than there are columns
    anchors = sample_anchors(loss_mask, count, BLOCK, sequence_ids, generator)
    assert anchors.columns.shape == anchors.block_keep_mask.shape == (3, count)
    for row in range(3):
        candidates = anchor_candidates(loss_mask[row].tolist(), sequence_ids[row].tolist())
        keep = anchors.block_keep_mask[row]
        drawn = anchors.columns[row][keep].tolist()
        assert len(drawn) == min(count, len(candidates))
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= candidates
        assert keep.tolist() == [True] * len(drawn) + [False] * (count - len(drawn))
        assert not anchors.columns[row][~keep].any()


def test_every_pair_of_candidates_is_equally_likely():
    loss_mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]).expand(20_000, -1)  # candidates 1, 2, 6, 7, 8
    anchors = sample_anchors(loss_mask, 2, BLOCK, generator=torch.Generator().manual_seed(0))
    pairs = anchors.columns[:, 0] * 11 + anchors.columns[:, 1]
    candidates = [1, 2, 6, 7, 8]
    cells = [first * 11 + second for first in candidates for second in candidates if first < second]
    counts = pairs.bincount(minlength=121)[cells]
    assert counts.sum() == 20_000
    assert chi_square(counts, torch.full((10,), 0.1)).p_value > 1e-9  # the rate of false failures


def test_the_generator_decides_the_anchors():
    loss_mask = torch.ones(2, 40)
    first, again, other = (
        sample_anchors(loss_mask, 5, BLOCK, generator=torch.Generator().manual_seed(seed)).columns
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_row_without_candidates_holds_dummies_only():
    loss_mask = torch.tensor([[0, 0, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1]])
    anchors = sample_anchors(loss_mask, 2, BLOCK)
    assert anchors.block_keep_mask.tolist() == [[False, False], [True, False]]
    assert anchors.columns.tolist() == [[0, 0], [6, 0]]


@pytest.mark.parametrize("mask", [[0] * 8, [0, 1, 0, 1, 0, 1, 0, 1], [0] * 7 + [1]])
def test_a_batch_without_anchors_is_refused(mask):
    with pytest.raises(ValueError, match="No token of this batch of 1 rows can be an anchor"):
        sample_anchors(torch.tensor([mask]), 2, BLOCK)


def test_padding_is_never_an_anchor_whatever_the_loss_mask_says():
    sequence_ids = torch.tensor([[1] * 6 + [0] * 4])
    anchors = sample_anchors(torch.ones(1, 10), 9, BLOCK, sequence_ids)
    assert anchors.columns[anchors.block_keep_mask].tolist() == [0, 1, 2, 3, 4]


def test_a_sequence_shorter_than_a_block_is_refused():
    with pytest.raises(ValueError, match=r"Sequences of \[3, 4\] tokens are shorter than a block.*fewer than 5"):
        sample_anchors(torch.ones(2, 8), 2, BLOCK, torch.tensor([[1] * 4 + [0] * 4, [1] * 5 + [2] * 3]))
    with pytest.raises(ValueError, match="shorter than a block"):
        sample_anchors(torch.ones(2, BLOCK), 2, BLOCK)
    sample_anchors(torch.ones(2, BLOCK + 1), 2, BLOCK)


@pytest.mark.parametrize("row", [[1] * 5 + [0] + [1] * 5, [1] * 5 + [2] * 5 + [1]])
def test_a_sequence_in_pieces_is_refused(row):
    with pytest.raises(ValueError, match="in pieces"):
        sample_anchors(torch.ones(1, 11), 2, BLOCK, torch.tensor([row]))


def test_shapes_that_disagree_are_refused(target):
    config = make_drafter(target).config
    anchors = Anchors(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))
    ids = torch.ones(1, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="`num_anchors` must be at least 1"):
        sample_anchors(ids, 0, BLOCK)
    with pytest.raises(ValueError, match="sequence_ids of the loss mask's shape"):
        sample_anchors(ids, 2, BLOCK, ids[:, :-1])
    with pytest.raises(ValueError, match="of one shape"):
        pack_blocks(config, ids[:, :-1], ids, anchors)
    with pytest.raises(ValueError, match="of one shape"):
        pack_blocks(config, ids.expand(2, -1), ids.expand(2, -1), anchors)


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_hold_the_ground_truth_up_to_the_first_unsupervised_token(target, seed, slot):
    generator = torch.Generator().manual_seed(seed)
    loss_mask, sequence_ids = random_layout(generator)
    input_ids = torch.randint(3, VOCAB, loss_mask.shape, generator=generator)
    config = make_drafter(target, first_prediction_slot=slot, mask_token_id=2).config
    anchors = sample_anchors(loss_mask, 12, BLOCK, sequence_ids, generator)
    blocks = pack_blocks(config, input_ids, loss_mask, anchors, sequence_ids)
    inputs, positions = blocks.input_ids.view(3, 12, -1), blocks.position_ids.view(3, 12, -1)
    assert inputs.shape[2] == BLOCK + slot
    assert torch.equal(blocks.block_keep_mask, anchors.block_keep_mask)
    assert not blocks.supervised[~anchors.block_keep_mask].any()
    for row, block in anchors.block_keep_mask.nonzero().tolist():
        anchor = int(anchors.columns[row, block])
        start = first_column(sequence_ids, row, anchor)
        assert inputs[row, block].tolist() == [int(input_ids[row, anchor])] + [2] * (BLOCK - 1 + slot)
        assert positions[row, block].tolist() == list(range(anchor - start, anchor - start + BLOCK + slot))
        length = supervised_length(loss_mask[row].tolist(), sequence_ids[row].tolist(), anchor, BLOCK)
        assert length >= 1
        assert blocks.supervised[row, block].tolist() == [True] * length + [False] * (BLOCK - length)
        text = input_ids[row].tolist()
        assert blocks.previous_ids[row, block, :length].tolist() == text[anchor : anchor + length]
        assert blocks.target_ids[row, block, :length].tolist() == text[anchor + 1 : anchor + 1 + length]
        assert blocks.label_columns[row, block, :length].tolist() == list(range(anchor, anchor + length))
    for row in range(3):
        for column in sequence_ids[row].nonzero().flatten().tolist():
            assert blocks.context_position_ids[row, column] == column - first_column(sequence_ids, row, column)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_query_sees_its_context_and_its_block_and_nothing_else(target, variant):
    config = make_drafter(target, **VARIANTS[variant]).config
    sequence_ids = torch.tensor([[0] + [1] * 8 + [2] * 9])
    anchors = Anchors(torch.tensor([[3, 7, 9, 14, 0]]), torch.tensor([[True, True, True, True, False]]))
    blocks = pack_blocks(config, torch.ones_like(sequence_ids), torch.ones_like(sequence_ids), anchors, sequence_ids)
    masks = packed_attention_mask(config, blocks, torch.bfloat16)
    slots, columns = config.num_block_inputs, sequence_ids.shape[1]
    starts = {3: 1, 7: 1, 9: 9, 14: 9}
    for name, mask in masks.items():
        assert mask.shape == (1, 1, 5 * slots, columns + 5 * slots)
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.bfloat16).min}
        window = config.sliding_window if name == "sliding_attention" else 1000
        for block, anchor in enumerate(anchors.columns[0].tolist()):
            for slot in range(slots):
                past = range(starts[anchor], anchor) if block < 4 else []
                last = slot if name in config.causal_layer_types else slots - 1
                expected = {column for column in past if anchor + slot - column < window}
                expected |= {columns + block * slots + key for key in range(last + 1) if slot - key < window}
                seen = (mask[0, 0, block * slots + slot] == 0).nonzero().flatten().tolist()
                assert set(seen) == expected, (name, block, slot)
    assert set(masks) == set(config.layer_types)


def unpacked(drafter, target, input_ids, taps, start, anchor):
    """h of one block, `(I, D)`, in a forward of its own, with the mask that the model makes itself."""
    length = anchor - start
    block = drafter.block_input_ids(input_ids[anchor][None])
    return drafter(
        target.get_input_embeddings()(block),
        drafter.project_context(taps[None, start:anchor]),
        length + torch.arange(block.shape[1])[None],
        torch.arange(length)[None],
    ).last_hidden_state[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packing_changes_no_number(target, variant, layout, attention):
    drafter = make_drafter(target, **VARIANTS[variant]).requires_grad_(False)
    drafter.set_attn_implementation(attention)
    torch.manual_seed(4)
    sequence_ids = torch.tensor(LAYOUTS[layout])
    input_ids = torch.randint(3, VOCAB, sequence_ids.shape)
    taps = torch.randn(*sequence_ids.shape, drafter.fc.in_features)
    loss_mask = torch.ones_like(input_ids)
    anchors = sample_anchors(loss_mask, 17, drafter.config.block_size, sequence_ids)
    blocks = pack_blocks(drafter.config, input_ids, loss_mask, anchors, sequence_ids)
    taps[~blocks.visible_context.any(dim=1)] = float("nan")  # padding, and what lies behind the last anchor
    hidden = block_hidden_states(drafter, blocks, taps, target.get_input_embeddings()).unflatten(0, (2, -1))
    assert torch.isfinite(hidden).all()  # dummies included: NaN times weight 0 would spoil the gradients of the others
    for row, block in anchors.block_keep_mask.nonzero().tolist():
        anchor = int(anchors.columns[row, block])
        start = first_column(sequence_ids, row, anchor)
        alone = unpacked(drafter, target, input_ids[row], taps[row], start, anchor)
        torch.testing.assert_close(hidden[row, block], alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_packed_forward_runs_in_half_precision(target, dtype, autocast):
    drafter = make_drafter(target).requires_grad_(False)
    input_ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    taps = torch.randn(2, 20, drafter.fc.in_features, generator=torch.Generator().manual_seed(1))
    loss_mask = torch.ones_like(input_ids)
    blocks = pack_blocks(drafter.config, input_ids, loss_mask, sample_anchors(loss_mask, 6, BLOCK))
    exact = block_hidden_states(drafter, blocks, taps, target.get_input_embeddings())
    if not autocast:
        drafter.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        rounded = block_hidden_states(drafter, blocks, taps, target.get_input_embeddings()).float()
    # Two layers of bfloat16, 3 significant digits each; a lost mask moves the mean by 0.8.
    assert (rounded - exact).abs().mean() < 0.05


def test_missing_embedding_and_foreign_taps_are_refused(target):
    drafter = make_drafter(target)
    ids = torch.ones(1, 9, dtype=torch.long)
    blocks = pack_blocks(drafter.config, ids, ids, sample_anchors(ids, 2, BLOCK))
    taps = torch.zeros(1, 9, drafter.fc.in_features)
    with pytest.raises(ValueError, match="no embedding of its own: pass the target's"):
        block_hidden_states(drafter, blocks, taps)
    for wrong in (taps[..., :-1], taps[:, :-1]):
        with pytest.raises(ValueError, match=r"Expected taps of shape \(1, 9, 32\)"):
            block_hidden_states(drafter, blocks, wrong, target.get_input_embeddings())
