from tests.experiments.conftest import toy_config as toy_config
