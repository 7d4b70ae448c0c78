"""`dspark-hf generate` on a tiny pair saved to disk."""

import pytest
from conftest import make_drafter, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf import cli


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    target = make_target()
    paths = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    target.save_pretrained(paths[0])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0").save_pretrained(paths[0])
    make_drafter(target).save_pretrained(paths[1])
    return [str(path) for path in paths]


def run(folders, *more):
    prompt = ["--prompt", "w5 w9 w11", "--max-new-tokens", "12", "--device", "cpu"]
    return cli.main(["generate", "--target", folders[0], "--drafter", folders[1], *prompt, *more])


def test_streams_the_targets_own_text_and_ends_with_one_line_of_statistics(folders, capsys):
    assert run(folders) == 0
    printed = capsys.readouterr()
    words = printed.out.split()
    assert len(words) == 12
    assert all(word.startswith("w") for word in words)
    assert "accepted length" in printed.err.splitlines()[-1]
    target, _, tokenizer = cli.load_pair(*folders, "cpu", "auto")
    plain = target.generate(**cli.encode_prompt(tokenizer, "w5 w9 w11"), max_new_tokens=12, do_sample=False)
    assert words == tokenizer.decode(plain[0, 3:], skip_special_tokens=True).split()


def test_a_seed_repeats_a_sample(folders, capsys):
    sampled = []
    for _ in range(2):
        assert run(folders, "--temperature", "1.5", "--seed", "3") == 0
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1]


def test_options_reach_the_drafter(folders, capsys):
    assert run(folders, "--num-draft-tokens", "1") == 0
    verified = float(capsys.readouterr().err.splitlines()[-1].split("rounds, ")[1].split(" ")[0])
    assert verified <= 1.0
    assert run(folders, "--schedule", "threshold", "--threshold", "0.4") == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--threshold", "1.5", "--schedule", "threshold"), "must lie in"),
        (("--threshold", "0.5"), "only with"),
        (("--drafter", "nowhere/at-all"), "dspark-hf generate:"),
    ],
)
def test_a_mistake_gives_one_line_and_status_2(folders, capsys, more, message):
    assert run(folders, *more) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
