"""Targets with PEFT adapters: the text is that of the adapted model."""

from types import SimpleNamespace

import pytest
import torch
from conftest import left_padded, make_drafter, make_target

import dspark_hf
from dspark_hf.outputs import DSparkGenerateOutput


peft = pytest.importorskip("peft")
# PEFT 0.21 asks for a name that transformers 5.24 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TASK = {"task_type": "CAUSAL_LM"}
ADAPTERS = {
    "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], **TASK),
    "lora without a task": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "dora on all": peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, **TASK),
    "lora on head and embedding": peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"], **TASK),
    "own head and embedding": peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], **TASK
    ),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"], **TASK),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "adaption prompt": peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, **TASK),
}
REFUSED = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=3, **TASK),
    "activated LoRA": peft.LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[7, 8], **TASK),
}
OPTIONS = {"max_new_tokens": 20, "return_dict_in_generate": True}


def small_target():
    return make_target(num_hidden_layers=2)


def adapted(config, seed: int = 10):
    """A tiny target with random, non-zero adapters that change its text."""
    model = peft.get_peft_model(small_target(), config).eval()
    randomise(model, seed)
    return model


def randomise(model, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_text_is_the_adapted_models(kind):
    model = adapted(ADAPTERS[kind])
    drafter = make_drafter(model.get_base_model())
    for lengths in ([6], [6, 9]):
        inputs = left_padded(lengths)
        plain = model.generate(**inputs, **OPTIONS).sequences
        passed = model.generate(**inputs, **OPTIONS, assistant_model=drafter)
        dspark_hf.attach(model, drafter)
        attached = model.generate(**inputs, **OPTIONS)
        dspark_hf.detach(model)
        for run in (passed, attached):
            assert isinstance(run, DSparkGenerateOutput)
            assert torch.equal(run.sequences, plain)
    assert not torch.equal(plain, small_target().generate(**inputs, max_new_tokens=20))
    assert not isinstance(model.generate(**inputs, **OPTIONS), DSparkGenerateOutput)


@pytest.fixture
def attached():
    model = adapted(ADAPTERS["lora"])
    dspark_hf.attach(model, make_drafter(model.get_base_model()))
    return model


def check_drafts(model, *lengths: int) -> torch.Tensor:
    """Check that a model drafts and writes what it writes alone; return that."""
    inputs = left_padded(list(lengths))
    run = model.generate(**inputs, **OPTIONS)
    assert isinstance(run, DSparkGenerateOutput)
    assert torch.equal(run.sequences, model.generate(**inputs, max_new_tokens=20, assistant_model=None))
    return run.sequences


def test_disabled_adapters_leave_the_targets_own_text(attached):
    with_adapters = check_drafts(attached, 6, 9)
    with attached.disable_adapter():
        alone = check_drafts(attached, 6, 9)
    assert torch.equal(alone, small_target().generate(**left_padded([6, 9]), max_new_tokens=20))
    assert not torch.equal(with_adapters, alone)
    assert torch.equal(check_drafts(attached, 6, 9), with_adapters)


def test_merging_keeps_the_drafter(attached):
    before = check_drafts(attached, 6, 9)
    attached.merge_adapter()
    assert torch.equal(check_drafts(attached, 6, 9), before)
    attached.unmerge_adapter()
    assert torch.equal(check_drafts(attached, 6, 9), before)
    merged = attached.merge_and_unload()
    assert torch.equal(check_drafts(merged, 6, 9), before)
    dspark_hf.detach(merged)
    assert not isinstance(merged.generate(**left_padded([6]), **OPTIONS), DSparkGenerateOutput)


def test_the_adapter_in_use_decides(attached):
    first = check_drafts(attached, 6, 9)
    attached.add_adapter("second", ADAPTERS["lora"])
    attached.set_adapter("second")
    randomise(attached, seed=8)
    second = check_drafts(attached, 6, 9)
    assert not torch.equal(first, second)
    # Rows of one batch with adapters of their own.
    inputs = left_padded([6, 9]) | {"adapter_names": ["default", "second"], "max_new_tokens": 20}
    mixed = attached.generate(**inputs)
    assert torch.equal(mixed, attached.generate(**inputs, assistant_model=None))
    attached.set_adapter("default")
    assert torch.equal(check_drafts(attached, 6, 9), first)


def test_attaching_before_wrapping_works_too():
    target = small_target()
    dspark_hf.attach(target, make_drafter(target))
    model = peft.get_peft_model(target, ADAPTERS["lora"]).eval()
    randomise(model, seed=10)
    check_drafts(model, 6, 9)


def test_adapters_that_transformers_itself_adds_work():
    target = small_target()
    drafter = make_drafter(target)
    inputs = left_padded([6, 9])
    before = target.generate(**inputs, max_new_tokens=20)
    try:
        target.add_adapter(ADAPTERS["lora"])
    except ValueError as error:
        pytest.skip(str(error))  # the two are not of an age
    randomise(target, seed=10)
    target.eval()
    dspark_hf.attach(target, drafter)
    assert not torch.equal(check_drafts(target, 6, 9), before)


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_do_not_treat_tokens_alone_are_refused(kind):
    model = adapted(REFUSED[kind])
    drafter = make_drafter(model.get_base_model())
    inputs = left_padded([6])
    for call in (lambda: dspark_hf.attach(model, drafter), lambda: model.generate(**inputs, assistant_model=drafter)):
        with pytest.raises(NotImplementedError, match=f"{kind} adapters.*without a drafter"):
            call()
    assert model.generate(**inputs, max_new_tokens=4) is not None  # alone it works as before


def test_x_lora_is_refused():
    target = small_target()
    target.peft_config = {"default": SimpleNamespace(peft_type="XLORA", is_prompt_learning=False)}
    with pytest.raises(NotImplementedError, match="XLORA adapters"):
        dspark_hf.attach(target, make_drafter(target))


def test_a_drafter_of_another_target_is_refused(attached):
    other = make_target(hidden_size=16, head_dim=4)
    with pytest.raises(ValueError, match="made for another target"):
        dspark_hf.attach(attached, make_drafter(other))
