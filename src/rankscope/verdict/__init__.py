"""From findings to a verdict: ranking, words, what is news, what it is too early to say."""
