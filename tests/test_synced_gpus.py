"""`synced_gpus`: ranks that shard one target must run as many target forwards as each other."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import left_padded, make_drafter, make_scripted, make_target, oracle_script


NEW_TOKENS = 14


def decode(target, rank: int, synced: bool):
    """Rank 0 has a perfect drafter and is done early; rank 1 a random one. Return output and number of forwards."""
    prompt = left_padded([6, 9][: rank + 1], seed=rank)
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "return_dict_in_generate": True}
    plain = target.generate(**prompt, **settings)
    perfect = make_scripted(target, oracle_script(plain.sequences, [6], 6))
    forwards = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    drafter = perfect if rank == 0 else make_drafter(target)
    output = target.generate(**prompt, **settings, assistant_model=drafter, synced_gpus=synced)
    handle.remove()
    assert torch.equal(output.sequences, plain.sequences)
    for ours, theirs in zip(output.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=0)
    return len(forwards)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    counts = torch.zeros(2, dtype=torch.long)
    counts[rank] = decode(make_target(), rank, synced=True)
    dist.all_reduce(counts)
    dist.destroy_process_group()
    if counts[0] != counts[1]:
        raise AssertionError(f"ranks ran {counts.tolist()} target forwards")


def test_a_rank_that_is_done_keeps_the_others_company(tmp_path):
    alone = decode(make_target(), 0, synced=False), decode(make_target(), 1, synced=False)
    assert alone[0] < alone[1], "without syncing the ranks must differ, or this test shows nothing"
    mp.spawn(run_rank, args=(str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("extra", [1, 5])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("scores", [False, True])
def test_forwards_for_company_leave_no_trace(monkeypatch, extra, rows, scores):
    target = make_target()
    prompt = left_padded([6, 9][:rows])
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_scores": scores}
    plain = target.generate(**prompt, **settings)
    left = [extra]

    def goes_on(finished, *_args, **_kwargs):
        left[0] -= int(finished)
        return left[0] >= 0

    monkeypatch.setattr(target, "_has_unfinished_sequences", goes_on)
    output = target.generate(**prompt, **settings, assistant_model=make_drafter(target))
    assert left[0] < 0
    assert torch.equal(output.sequences, plain.sequences)
    for ours, theirs in zip(output.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=0)
