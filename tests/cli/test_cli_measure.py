from __future__ import annotations

import json
import runpy

import pytest
import torch

from hessinit import CurvatureReport, measure


def measured(net, function, **options):
    """The truth: the same file run by hand with the same seed, measured by the library."""
    torch.manual_seed(options.pop("file_seed", 0))
    model, loss, batch, *keywords = runpy.run_path(str(net))[function]()
    return measure(model, loss, batch, **{**(keywords[0] if keywords else {}), **options})


def same(one: str, report: CurvatureReport) -> bool:
    return {**json.loads(one), "seconds": 0} == {**report.to_dict(), "seconds": 0}


def test_a_file_s_function_is_measured(run, net):
    result = run("measure", f"{net}:problem")
    assert result.exit_code == 0, result.output
    assert "conv" in result.stdout
    assert "(4, 108)" in result.stdout
    assert "Gauss-Newton on 6 examples" in result.stdout.replace("\n", " ")


def test_json_is_exactly_what_the_library_measures(run, net):
    result = run("measure", f"{net}:problem", "--json")
    assert same(result.stdout, measured(net, "problem"))


def test_the_fourth_value_s_keywords_are_passed_on(run, net):
    result = run("measure", f"{net}:scaled", "--json")
    assert same(result.stdout, measured(net, "scaled"))
    assert json.loads(result.stdout)["curvature"] == "both"
    assert json.loads(result.stdout)["seed"] == 3


def test_options_win_over_the_fourth_value(run, net):
    options = ["--curvature", "hessian", "--layers", "he*", "--tolerance", "1e-5", "--seed", "7"]
    result = run("measure", f"{net}:scaled", "--json", *options)
    expected = measured(
        net, "scaled", curvature="hessian", layers=["he*"], tolerance=1e-5, seed=7, file_seed=7
    )
    assert same(result.stdout, expected)
    report = CurvatureReport.from_json(result.stdout)
    assert (report.names, report.tolerance, report.seed) == (("head",), 1e-5, 7)


def test_layers_can_be_given_several_times(run, net):
    result = run("measure", f"{net}:problem", "--json", "--layers", "head", "--layers", "conv.bias")
    assert [layer["name"] for layer in json.loads(result.stdout)["layers"]] == ["conv.bias", "head"]


def test_the_same_command_repeats_itself_and_another_seed_does_not(run, net):
    first, again, other = (run("measure", f"{net}:problem", "--json", "--seed", seed) for seed in (1, 1, 2))
    norms = [CurvatureReport.from_json(result.stdout).network.norm for result in (first, again, other)]
    assert norms[0] == norms[1] != norms[2]


def test_device_and_threads_are_taken(run, net):
    result = run("measure", f"{net}:problem", "--json", "--device", "cpu", "--threads", "1")
    assert json.loads(result.stdout)["versions"]["device"] == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_model_and_the_batch_go_to_the_device(run, net):
    result = run("measure", f"{net}:problem", "--json", "--device", "cuda")
    assert json.loads(result.stdout)["versions"]["device"].startswith("cuda")


def test_a_module_is_found_from_the_working_folder(run, net, tmp_path, monkeypatch):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(
        f"from runpy import run_path\nproblem = run_path({str(net)!r})['problem']\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run("measure", "mine.nets:problem", "--json")
    assert same(result.stdout, measured(net, "problem"))


def test_a_file_may_import_its_neighbours_and_is_found_anew_each_time(run, tmp_path, monkeypatch):
    for name, width in (("one", 3), ("two", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"width_{name}.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / name / "neighbourly.py").write_text(
            f"import torch\nfrom width_{name} import WIDTH\n"
            "def problem():\n"
            "    batch = torch.ones(4, 2), torch.ones(4, WIDTH)\n"
            "    return torch.nn.Linear(2, WIDTH), torch.nn.MSELoss(), batch\n"
        )
        result = run("measure", tmp_path / name / "neighbourly.py:problem", "--json")
        assert json.loads(result.stdout)["layers"][0]["shape"] == [width, 2], result.output


def test_a_file_called_torch_does_not_take_torch_s_place(run, net, tmp_path):
    own = tmp_path / "elsewhere" / "torch.py"
    own.parent.mkdir()
    own.write_text(net.read_text())
    assert run("measure", f"{own}:problem").exit_code == 0
    assert run("measure", f"{net}:problem").exit_code == 0


def test_not_converging_prints_the_report_and_ends_with_1(run, net):
    result = run("measure", f"{net}:unfinished")
    assert result.exit_code == 1
    assert "~" in result.stdout
    assert "raise max_iterations or tolerance" in result.stdout
    assert result.stderr == "Not converged: the report marks what did not reach tolerance 0.001.\n"


def test_strictly_not_converging_ends_with_1_and_the_reason(run, net):
    result = run("measure", f"{net}:strictly_unfinished")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Not converged: ")
    assert "did not reach tolerance=0.001" in result.stderr
