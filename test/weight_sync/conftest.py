"""Makes the helper beside the tests importable (``from push_tools import ...``)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
