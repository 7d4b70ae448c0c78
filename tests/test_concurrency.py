"""Other users of the same target: threads, and processors that run it themselves."""

import copy
import threading

import torch
from conftest import left_padded, make_drafter, make_target, oracle_script
from conftest import make_scripted as scripted
from transformers import LogitsProcessorList

from dspark_hf import DSparkDraftModel


def test_threads_that_share_a_target_do_not_disturb_each_other():
    target = make_target()
    prompts = [left_padded([5 + i], seed=i) for i in range(4)]
    plain = [target.generate(**prompt, max_new_tokens=20, eos_token_id=None) for prompt in prompts]
    drafters = [scripted(target, oracle_script(text, [5 + i], 5 + i)) for i, text in enumerate(plain)]
    outputs = [None] * 4

    def run(i: int) -> None:
        outputs[i] = target.generate(
            **prompts[i],
            max_new_tokens=20,
            eos_token_id=None,
            assistant_model=drafters[i],
            return_dict_in_generate=True,
        )

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, output in zip(plain, outputs, strict=True):
        assert torch.equal(output.sequences, expected)
        assert output.statistics.tau > 4


class NotingDrafter(DSparkDraftModel):
    """Notes what it drafts."""

    def draft(self, *args, **kwargs):
        drawn = super().draft(*args, **kwargs)
        self.noted.append(drawn.tokens.tolist())
        return drawn


def test_a_processor_may_run_the_target_itself():
    target = make_target()
    drafts = []
    for asked in (copy.deepcopy(target), target):  # the second leaves taps behind

        def second_opinion(input_ids, scores, asked=asked):
            return scores + 0.5 * asked(input_ids).logits[:, -1]

        prompt = left_padded([9])
        settings = {
            "max_new_tokens": 16,
            "eos_token_id": None,
            "logits_processor": LogitsProcessorList([second_opinion]),
        }
        plain = target.generate(**prompt, **settings)
        drafter = make_drafter(target)
        drafter.__class__, drafter.noted = NotingDrafter, []
        assert torch.equal(target.generate(**prompt, **settings, assistant_model=drafter), plain)
        drafts.append(drafter.noted)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 8
