"""Converts a GGUF model to safetensors: `python -m shared.adapters.model_conversion GGUF FOLDER`.

Runs in the environment that has vLLM: transformers reads the GGUF file and takes its quantised
weights apart; they are written as bfloat16, with tokenizer and chat template.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, target: Path) -> None:
    """Write a GGUF model as a folder that vLLM reads."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # Its weights are plain numbers by now, but it would refuse to write a quantised model.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
