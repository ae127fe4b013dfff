"""The former name of `memfine_fx.planning.training`."""

import warnings

from memfine_fx.planning.training import *  # noqa: F403  # an alias is exactly what it names
from memfine_fx.planning.training import __all__ as __all__

warnings.warn("memfine_fx.cluster is memfine_fx.planning.training now", DeprecationWarning, stacklevel=2)
