// The tools, in the order in which they are told of events. The next one is a file of its own and a line here.
#include "race.cpp"
#include "trace.cpp"
#include "unwritten.cpp"
