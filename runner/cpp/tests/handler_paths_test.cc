// Whose a request is, by its path, and which header lines go to a handler and come back.
#include "doors/handler_paths.h"

#include <boost/test/unit_test.hpp>

#include "tests/support.h"

namespace mctl {
namespace {

using Words = std::vector<std::string>;

std::string text_of(std::string_view target) {
  const auto path = handler_path(segments_of(target));
  if (!path) return "none";
  std::string text = path->name + "|" + path->version + "|";
  for (const std::string& segment : path->rest) text += "/" + segment;
  return text;
}

BOOST_AUTO_TEST_CASE(handler_paths_name_a_model) {
  BOOST_TEST(text_of("/predictions/m") == "m||");
  BOOST_TEST(text_of("/predictions/m/?a=/b") == "m||");
  BOOST_TEST(text_of("/predictions/a%2Fb/2/classify") == "a/b||/2/classify");
  BOOST_TEST(text_of("/v2/models/m/predict") == "m||");
  BOOST_TEST(text_of("/v2/models/m/versions/3/predict") == "m|3|");
  for (const auto* other : {"/", "/predictions", "/v2/models/m/infer", "/v2/models/predict", "/v2/models/m/x/3/predict",
                            "/v2/models/m/versions/predict", "/v2/models/m/versions/3/4/predict", "/classify"}) {
    BOOST_TEST(text_of(other) == "none", other);
  }
}

BOOST_AUTO_TEST_CASE(routes_meet_requests_by_path_and_verb) {
  const HandlerRoute routes[] = {{"POST", "/classify"}, {"GET", "/items/{id}"}, {"DELETE", "/items/{id}/"}};
  const auto met = [&](std::string_view verb, const Words& path) {
    const RouteMatch found = match(routes, verb, path);
    return std::string(found.verb ? "yes" : found.path ? "path" : "no") + " " + found.allowed;
  };
  BOOST_TEST(met("POST", {"classify"}) == "yes POST");
  BOOST_TEST(met("GET", {"classify"}) == "path POST");
  BOOST_TEST(met("POST", {"classify", "more"}) == "no ");
  BOOST_TEST(met("HEAD", {"items", "7"}) == "yes GET, HEAD, DELETE");
  BOOST_TEST(met("DELETE", {"items", "7"}) == "yes GET, HEAD, DELETE");
  BOOST_TEST(met("GET", {"items", ""}) == "no ");
  BOOST_TEST(met("GET", {"items"}) == "no ");
}

BOOST_AUTO_TEST_CASE(routes_overlap_where_one_path_could_be_of_both) {
  BOOST_TEST(overlap({"GET", "/a/{x}"}, {"GET", "/a/b"}));
  BOOST_TEST(overlap({"GET", "/{x}/b"}, {"GET", "/a/{y}"}));
  BOOST_TEST(!overlap({"GET", "/a"}, {"POST", "/a"}));
  BOOST_TEST(!overlap({"GET", "/a"}, {"GET", "/a/b"}));
  BOOST_TEST(!overlap({"GET", "/a/c"}, {"GET", "/a/b"}));
}

BOOST_AUTO_TEST_CASE(routes_that_cannot_be_are_refused) {
  BOOST_TEST(why(check_route({"POST", "/classify"})) == "");
  BOOST_TEST(why(check_route({"POST", "/v1/embeddings"})) == "");
  BOOST_TEST(why(check_route({"post", "/a"})) == "the route `post /a` has no verb such as POST");
  BOOST_TEST(why(check_route({"A B", "/a"})) == "the route `A B /a` has no verb such as POST");
  BOOST_TEST(why(check_route({"POST", "a"})) == "the route `POST a` is no path such as /classify");
  BOOST_TEST(why(check_route({"POST", "/"})) == "the route `POST /` is no path such as /classify");
  for (const auto* path :
       {"/v2/x", "/metrics", "/predictions/m", "/admin/v1/state", "/models", "/ping", "/m%65trics"}) {
    BOOST_TEST(why(check_route({"GET", path})).ends_with("would hide a path of the server's own"), path);
  }
  BOOST_TEST(why(check_route({"GET", "/{any}"})).ends_with("begins with what stands for any name"));
}

BOOST_AUTO_TEST_CASE(lines_of_a_head_are_taken_as_they_came) {
  const HeaderLines expected = {{"host", "h:1"}, {"x-a", "b: c"}, {"x-a", ""}};
  BOOST_TEST((lines_of("GET / HTTP/1.1\r\nHost: h:1\r\nX-A: \t b: c \r\nx-a:\r\n\r\n") == expected));
  BOOST_TEST(lines_of("GET / HTTP/1.1\r\n\r\n").empty());
  BOOST_TEST(lines_of("").empty());
}

BOOST_AUTO_TEST_CASE(lines_of_an_answer_are_what_may_be_sent) {
  const auto fields = [](const HeaderLines& lines) {
    std::string type = "none";
    const auto made = fields_from(lines, type);
    return made ? type + "|" + *made : "refused";
  };
  BOOST_TEST(fields({{"X-A", "b"}, {"Content-TYPE", "text/plain"}}) == "text/plain|X-A: b\r\n");
  BOOST_TEST(fields({{"content-length", "5"}, {"Connection", "close"}, {"Transfer-Encoding", "x"}}) == "none|");
  BOOST_TEST(fields({{"x-a", "b\r\nx: y"}}) == "refused");
  BOOST_TEST(fields({{"x-a", std::string("b\0c", 3)}}) == "refused");
  BOOST_TEST(fields({{"x a", "b"}}) == "refused");
  BOOST_TEST(fields({{"", "b"}}) == "refused");
  BOOST_TEST(fields({{"content-type", "a\nb"}}) == "refused");
}

}  // namespace
}  // namespace mctl
