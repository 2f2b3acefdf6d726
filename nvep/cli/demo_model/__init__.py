"""The demo's model: a small mixture-of-experts language model over bytes, trained by ``tools/train_demo_model.py``."""

from nvep.cli.demo_model.generate import Generated, StepPlan, feed_order, generate, plan_steps, split_prompts
from nvep.cli.demo_model.model import DecoderModel, Experts, ReferenceExperts
from nvep.cli.demo_model.prompts import PROMPTS
from nvep.cli.demo_model.weights import ModelShape, ModelWeights, load_weights

__all__ = [
    "PROMPTS",
    "DecoderModel",
    "Experts",
    "Generated",
    "ModelShape",
    "ModelWeights",
    "ReferenceExperts",
    "StepPlan",
    "feed_order",
    "generate",
    "load_weights",
    "plan_steps",
    "split_prompts",
]
