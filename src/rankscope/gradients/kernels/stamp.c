/* The hash of the sources that this library was compiled from; see build.py. */
const char *const rankscope_sources = RANKSCOPE_SOURCES;
