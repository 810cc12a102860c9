"""``rankscope demo`` where it fails; ``study/test_shown_figures`` has what it shows."""

from rankscope.cli import demo


def test_a_training_that_fails_is_said(command, tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "STEPS", "no number")
    code, _, err = command("demo", "--output", folder)
    assert code == 2
    assert "the training failed: worker" in err
    assert "ValueError" in (folder / "error.log").read_text()
