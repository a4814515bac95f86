-- ARGV: epoch, then id, token, arrival, score of each entry. Returns 1 per entry put in place.
local fenced = enter(ARGV[1])
if fenced then return fenced end

-- Whether the entry's index still holds it (a server set to evict keys may drop one of the two).
local function is_indexed(id, entry)
  return redis.call('ZSCORE', INDEX_OF[state_of(entry)], member_of(id, entry))
end

local added = {}
for i = 2, #ARGV, 4 do
  local id, token = ARGV[i], ARGV[i + 1]
  local old = redis.call('HGET', ENTRIES, id)
  local stays = old and (token_of(old) > token or (token_of(old) == token and is_indexed(id, old)))
  if not stays then
    if old then forget(id, old) end
    local entry = 'w' .. token .. ARGV[i + 2] .. ARGV[i + 3]
    redis.call('HSET', ENTRIES, id, entry)
    redis.call('ZADD', WAITING, ARGV[i + 3], member_of(id, entry))
  end
  added[#added + 1] = stays and 0 or 1
end
return added
