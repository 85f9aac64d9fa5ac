// The part of Boost.JSON that is compiled once for all files.
#include <boost/json/src.hpp>
