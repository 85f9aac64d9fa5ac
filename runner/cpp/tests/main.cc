// Boost.Test itself, compiled once; every other file of this folder adds cases to it.
#define BOOST_TEST_MODULE runner
#include <boost/test/included/unit_test.hpp>
