import sys

from experiments.bench.cli import main

sys.exit(main())
