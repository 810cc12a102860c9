"""``rankscope parity``: whether two layouts of a training train the same."""
