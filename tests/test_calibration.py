"""Calibrated confidences: `sigmoid(logit / T)`, one temperature for each position."""

import pytest
import torch

from dspark_hf.calibration import calibrated_confidence


def test_confidence_is_the_sigmoid_of_the_logit_over_its_positions_temperature():
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 4.0, -3.0]])
    temperatures = torch.tensor([2.0, 0.5, 1.0])
    expected = 1 / (1 + torch.exp(-logits.double() / temperatures.double()))
    torch.testing.assert_close(calibrated_confidence(logits, temperatures).double(), expected, atol=1e-6, rtol=0)


def test_without_temperatures_confidence_is_the_sigmoid():
    logits = torch.randn(3, 5)
    assert calibrated_confidence(logits, None).equal(logits.sigmoid())
    torch.testing.assert_close(calibrated_confidence(logits, torch.ones(5)), logits.sigmoid())


def test_a_shorter_block_takes_the_first_temperatures():
    logits = torch.randn(3, 2)
    torch.testing.assert_close(
        calibrated_confidence(logits, torch.tensor([2.0, 3.0, 4.0, 5.0])),
        calibrated_confidence(logits, torch.tensor([2.0, 3.0])),
    )


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 20.0])
def test_each_position_keeps_its_order_and_its_side_of_one_half(temperature):
    torch.manual_seed(0)
    logits = torch.randn(50, 1).sort(dim=0).values
    confidence = calibrated_confidence(logits, torch.tensor([temperature]))
    assert (confidence.diff(dim=0) >= 0).all()
    assert (confidence > 0.5).equal(logits > 0)
    assert ((confidence >= 0) & (confidence <= 1)).all()
