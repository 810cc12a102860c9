"""``rankscope demo`` where it fails; ``study/test_shown_figures`` has what it shows."""

import pytest

from rankscope.cli import demo, main


def test_a_training_that_fails_is_said(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "STEPS", "no number")
    monkeypatch.setattr("sys.argv", ["rankscope", "demo", "--output", str(folder)])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert "the training failed: worker" in capsys.readouterr().err
    assert "ValueError" in (folder / "error.log").read_text()
