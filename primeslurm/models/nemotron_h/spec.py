"""Family record of Nemotron-H and Nemotron 3: separate layers of Mamba-2, attention and experts."""

from dataclasses import replace

from primeslurm.models.family import ATTENTION, MOE, Family, Parsers

FAMILY = Family(
    name="nemotron_h",
    model_types={"nemotron_h": replace(MOE, compile=True)},
    parsers={r"nemotron-?3": Parsers("qwen3_coder", "nemotron_v3")},
    renderer="nemotron-3",
    renderers={r"nemotron-?3-?ultra": "nemotron-3-ultra", r"nemotron-?3\.5": "nemotron-3.5"},
    # Experts are not SwiGLU, so they have no adapters.
    lora_targets=ATTENTION | {"up_proj", "down_proj", "in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj"},
)
