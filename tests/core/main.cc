// The main function of the core's tests; each test_<part>.cc adds its own.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
