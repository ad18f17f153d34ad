"""What runs inside Redis: each script is one transaction."""

# Of a session: version (the epoch of the last change), seq, steps, opened, touched, fingerprint, state, answers a0, a1
# and so on; and of its lease: epoch, holder, until.

CLAIM = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local counter = KEYS[#KEYS]
local found = {}
for i = 1, #KEYS - 1 do
  local is = redis.call('HMGET', KEYS[i], 'version', 'until', 'holder')
  if not is[1] then
    found[i] = false
  elseif is[2] and tonumber(is[2]) > now and is[3] ~= ARGV[1] then
    found[i] = {-1, tonumber(is[2]) - now}
  else
    local epoch = redis.call('INCR', counter)
    redis.call('HSET', KEYS[i], 'epoch', epoch, 'holder', ARGV[1], 'until', now + tonumber(ARGV[2]))
    if is[1] == ARGV[2 + i] then
      found[i] = {epoch, is[1]}
    else
      local row = redis.call('HMGET', KEYS[i], 'seq', 'steps', 'opened', 'touched', 'fingerprint', 'state')
      found[i] = {epoch, is[1], row[1], row[2], row[3], row[4], row[5], row[6]}
    end
  end
end
return found
"""

COMMIT = """
local names, touched, counter = KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS]
local life = tonumber(ARGV[1])
local versions = {}
local at = 3
for i = 1, #KEYS - 3 do
  local key = KEYS[i]
  local session, token, gone, anew = ARGV[at], ARGV[at + 1], ARGV[at + 2] == '1', ARGV[at + 3] == '1'
  local seq, fingerprint, stateful = ARGV[at + 4], ARGV[at + 8], ARGV[at + 9] == '1'
  local is = redis.call('HMGET', key, 'epoch', 'seq', 'fingerprint', 'version')
  local fits
  if token == '' then
    fits = not is[4]
  else
    fits = is[4] and is[1] == token
    if fits and not gone and not anew and is[2] ~= seq then
      fits = tonumber(is[2]) + 1 == tonumber(seq) and is[3] == fingerprint
    end
  end
  if not fits then
    versions[i] = -1
  elseif gone then
    redis.call('DEL', key)
    redis.call('ZREM', names, session)
    redis.call('ZREM', touched, session)
    versions[i] = 0
  else
    local version = token
    if token == '' then version = redis.call('INCR', counter) end
    if anew then redis.call('DEL', key) end
    redis.call('HSET', key, 'version', version, 'epoch', '', 'until', 0, 'seq', seq, 'steps', ARGV[at + 5],
      'opened', ARGV[at + 6], 'touched', ARGV[at + 7], 'fingerprint', fingerprint)
    if stateful then redis.call('HSET', key, 'state', ARGV[at + 10]) else redis.call('HDEL', key, 'state') end
    if ARGV[at + 11] ~= '' then redis.call('HSET', key, ARGV[at + 11], ARGV[at + 12]) end
    if life > 0 then redis.call('PEXPIRE', key, life) else redis.call('PERSIST', key) end
    redis.call('ZADD', names, 0, session)
    redis.call('ZADD', touched, ARGV[at + 7], session)
    versions[i] = tonumber(version)
  end
  at = at + 13
end
return versions
"""

RELEASE = """
for i, key in ipairs(KEYS) do
  if redis.call('HGET', key, 'epoch') == ARGV[i] then redis.call('HSET', key, 'until', 0) end
end
"""

SWEEP = """
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. ARGV[1], 'LIMIT', 0, tonumber(ARGV[2]))
for _, session in ipairs(old) do
  redis.call('DEL', ARGV[3] .. session)
  redis.call('ZREM', KEYS[1], session)
  redis.call('ZREM', KEYS[2], session)
end
return #old
"""
