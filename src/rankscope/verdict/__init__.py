"""From findings to a verdict: ranking, words, announcements, and checks that need more steps."""
