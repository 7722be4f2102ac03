"""What engine.py has vLLM import in each of its workers, be they processes of their own or not."""

from __future__ import annotations

from engine import register_loader

from spearfish.integrations import vllm as plugin

plugin.register()
register_loader()


class Prepared:
    """Adds nothing to vLLM's worker; that it is imported makes our methods and the load format known."""
