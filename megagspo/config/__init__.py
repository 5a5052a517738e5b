"""The configuration: its schema, how it is loaded, and checked. Imports neither torch nor megatron."""

from megagspo.config.checks import check_config, check_paths
from megagspo.config.compare import changes
from megagspo.config.loading import dump_config, load_config
from megagspo.config.schema import Config, Layout

__all__ = ["Config", "Layout", "changes", "check_config", "check_paths", "dump_config", "load_config"]
