"""Tests in the environment that has vLLM; `tests/service/test_vllm_suite.py` runs them there."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
