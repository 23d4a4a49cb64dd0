import pytest

from experiments import generate, train


def test_it_continues_the_prompt_of_a_run(gpt_run, capsys):
    args = [str(gpt_run.directory), "--prompt", "def ", "--length", "5"]
    assert generate.main([*args, "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ") and first.endswith("\n") and len(first.encode()) >= 10
    assert generate.main([*args, "--top-k", "1", "--seed", "7"]) == 0
    assert capsys.readouterr().out == first


MISTAKES = {
    "no run": (["nowhere"], "nowhere, which holds no run"),
    "length": (["RUN", "--length", "13", "--prompt", "defg"], "length is 13; wants at most 12"),
    "prompt": (["RUN", "--prompt", "d" * 16], "the prompt has 16 bytes; wants fewer than 16"),
    "zero byte": (["RUN", "--prompt", "\0"], "wants a text without zero bytes"),
    "no length": (["RUN", "--length", "0"], "length is 0; wants a whole number of at least 1"),
    "temperature": (["RUN", "--temperature", "-1"], "temperature is -1.0; wants a finite number of at least 0"),
    "top_k": (["RUN", "--top-k", "300"], "top_k is 300; wants a whole number from 1 to 256"),
    "seed": (["RUN", "--seed", "-1"], "seed is -1; wants a whole number from 0"),
}


@pytest.mark.parametrize(("args", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_users_mistake_ends_in_one_line_and_exit_code_2(args, message, gpt_run, capsys):
    assert generate.main([str(gpt_run.directory) if arg == "RUN" else arg for arg in args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_a_run_of_another_experiment_is_refused(toy_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(train.configs.EXPERIMENTS, "toy", toy_config)
    train.train(toy_config(epochs=1, run_dir=tmp_path / "run"))
    capsys.readouterr()
    assert generate.main([str(tmp_path / "run")]) == 2
    assert "is a run of toy; wants a run of gpt" in capsys.readouterr().err
