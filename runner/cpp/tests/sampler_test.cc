// The sampler by the vectors that Python runs too, and by published numbers of its generator.
#include "generation/sampler.h"

#include <boost/test/unit_test.hpp>
#include <cmath>

#include "tests/support.h"

namespace mctl {
namespace {

namespace json = boost::json;

BOOST_AUTO_TEST_CASE(philox_gives_the_published_numbers) {  // Random123's known answers
  using Four = std::array<std::uint32_t, 4>;
  constexpr std::uint32_t ones = 0xFFFFFFFF;
  BOOST_TEST((philox({0, 0, 0, 0}, {0, 0}) == Four{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  BOOST_TEST((philox({ones, ones, ones, ones}, {ones, ones}) == Four{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
}

// What a case of the vectors asks for, and what it lies in.
struct Case {
  explicit Case(const json::object& given) {
    draw.choice = given.at("choice").to_number<std::uint32_t>();
    prompt = json::value_to<std::vector<TokenId>>(given.at("prompt"));
    made = json::value_to<std::vector<TokenId>>(given.at("made"));
    const json::object& asked = given.at("sampling").as_object();
    Sampling& sampling = draw.sampling;
    for (const auto& [name, target] : {std::pair("temperature", &sampling.temperature),
                                       {"top_p", &sampling.top_p},
                                       {"min_p", &sampling.min_p},
                                       {"repetition", &sampling.repetition},
                                       {"presence", &sampling.presence},
                                       {"frequency", &sampling.frequency}})
      if (const auto* value = asked.if_contains(name)) *target = value->to_number<double>();
    if (const auto* seed = asked.if_contains("seed")) sampling.seed = seed->to_number<std::uint64_t>();
    if (const auto* count = asked.if_contains("top_k")) sampling.top_k = count->to_number<std::int64_t>();
    if (const auto* biases = asked.if_contains("bias"))
      for (const auto& [token, value] : biases->as_object())
        bias.emplace_back(std::stoi(token), value.to_number<float>());
    if (const auto* tokens = asked.if_contains("allowed")) {
      allowed.resize(10);
      for (const json::value& token : tokens->as_array())
        allowed[token.to_number<std::size_t>() / 32] |= 1U << token.to_number<std::size_t>() % 32;
    }
    draw.prompt = prompt;
    draw.made = made;
    draw.bias = bias;
    draw.allowed = allowed;
  }
  Draw draw;
  std::vector<TokenId> prompt, made;
  std::vector<std::pair<TokenId, float>> bias;
  std::vector<std::uint32_t> allowed;
};

BOOST_AUTO_TEST_CASE(vectors_of_the_sampler) {
  const json::value given = vectors("generation/sampling.json");
  for (const json::value& one : given.at("cases").as_array()) {
    BOOST_TEST_CONTEXT(json::serialize(one.at("sampling"))) {
      const auto logits =
          json::value_to<std::vector<float>>(given.at("rows").at(one.at("row").to_number<std::size_t>()));
      Sampler sampler(logits.size());
      Case asked(one.as_object());
      const auto wanted = json::value_to<std::vector<TokenId>>(one.at("tokens"));
      for (std::size_t index = 0; index < wanted.size(); ++index) {
        asked.draw.index = index;
        const TokenId token = sampler.choose(logits, asked.draw);
        BOOST_TEST(token == wanted[index]);
        std::vector<Scored> best(one.at("top").as_array().size());
        const Scored own = sampler.score(logits, token, best);
        BOOST_TEST(own.logprob == one.at("logprobs").at(index).to_number<double>(), boost::test_tools::tolerance(1e-4));
        for (std::size_t at = 0; at < best.size(); ++at) {
          BOOST_TEST(best[at].token == one.at("top").at(at).at(0).to_number<TokenId>());
          BOOST_TEST(best[at].logprob == one.at("top").at(at).at(1).to_number<double>(),
                     boost::test_tools::tolerance(1e-4));
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(a_large_vocabulary_is_sorted_no_further_than_needed_and_gives_the_same) {
  std::vector<float> logits(50'000);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7919 % 50'000) * 1e-4F;
  Sampler sampler(logits.size());
  Draw draw;
  draw.sampling.temperature = 1;
  std::vector<std::size_t> halves(2);  // e^2.5 - 1 to e^5 - e^2.5, of what is drawn from
  for (draw.index = 0; draw.index < 300; ++draw.index)
    ++halves[logits[static_cast<std::size_t>(sampler.choose(logits, draw))] >= 2.5F];
  BOOST_TEST(static_cast<double>(halves[0]) / 300.0 == 1 / (1 + std::exp(2.5)), boost::test_tools::tolerance(0.5));
}

}  // namespace
}  // namespace mctl
