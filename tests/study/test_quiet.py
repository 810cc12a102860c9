import logging

from transformers.utils import logging as transformers_logging

from rankscope.lab.study.quiet import quiet_transformers


def test_libraries_speak_as_before_afterwards() -> None:
    hub = logging.getLogger("huggingface_hub")
    before = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
        hub.level,
    )
    with quiet_transformers():
        assert transformers_logging.get_verbosity() == logging.ERROR
        assert not transformers_logging.is_progress_bar_enabled()
        assert not hub.isEnabledFor(logging.ERROR)
    after = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
        hub.level,
    )
    assert after == before
